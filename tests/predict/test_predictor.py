from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
import torch

from tests.predict.small import CLASSES, SIDE, make_net, pixels, write_images
from twoshift import Predictor, recommended
from twoshift.errors import BatchError, SettingError


@pytest.fixture
def predictor(known) -> Predictor:
    return Predictor(known.net, known.facts, probabilities=True, decoding={"frame": SIDE})


def test_batches_are_as_those_of_the_live_model(known, predictor):
    live, images = recommended(known.net, known.facts), pixels(48, 7, 0.6)[0]
    for k, part in enumerate(np.split(images, 3)):
        ids = np.arange(16) + 16 * k
        answer = predictor({"image": part, "id": ids})
        p = live(torch.from_numpy(part).permute(0, 3, 1, 2).float() / 255).softmax(1)
        assert np.array_equal(answer["id"], ids)
        assert answer["probabilities"] == pytest.approx(p.numpy(), abs=1e-6)
        assert answer["class"].tolist() == [CLASSES[c] for c in p.argmax(1).tolist()]
        assert answer["probability"] == pytest.approx(p.amax(1).numpy(), abs=1e-6)
        assert set(answer["state_version"]) == {k + 1}
        assert "image" not in answer
        assert not any(answer["error"])


def test_kinds_of_images_are_the_same(known, tmp_path):
    write_images(tmp_path, 6)
    paths = sorted(tmp_path.rglob("*.png"))
    from PIL import Image

    arrays = np.stack([np.array(Image.open(path)) for path in paths])
    kinds = {
        "pixels": arrays,
        "floats": arrays.transpose(0, 3, 1, 2).astype(np.float32) / 255,
        "bytes": np.array([path.read_bytes() for path in paths], object),
        "paths": np.array([str(path) for path in paths]),
        "list": [path.read_bytes() for path in paths],
    }
    found = {}
    for name, images in kinds.items():
        predictor = Predictor(known.net, known.facts, decoding={"frame": SIDE}, top=2)
        found[name] = predictor({"image": images})
    for answer in found.values():
        assert answer["probability"].tolist() == found["pixels"]["probability"].tolist()
        assert answer["class_2"].tolist() == found["pixels"]["class_2"].tolist()


def test_an_image_that_cannot_be_read_has_an_error(predictor, tmp_path):
    write_images(tmp_path, 4)
    encoded = [path.read_bytes() for path in sorted(tmp_path.rglob("*.png"))]
    encoded[2] = b"nothing"
    answer = predictor({"image": encoded})
    assert "cannot decode" in answer["error"][2]
    assert answer["class"][2] is None
    assert np.isnan(answer["probability"][2])
    assert np.isnan(answer["probabilities"][2]).all()
    assert all(answer["class"][[0, 1, 3]])
    only_bad = predictor({"image": [b""]})
    assert only_bad["state_version"].tolist() == [1]  # nothing was learnt


def test_streams(known):
    images = pixels(24, 8)[0]
    names = np.array(["p", "q"] * 12)
    mixed = Predictor(known.net, known.facts, stream="camera")({"image": images, "camera": names})
    for name in "pq":
        own = Predictor(known.net, known.facts)({"image": images[names == name]})
        assert mixed["probability"][names == name].tolist() == own["probability"].tolist()


def test_a_function_makes_the_model_on_a_worker(known, tmp_path):
    known.facts.save(tmp_path / "facts")

    def make():
        net = make_net()
        net.load_state_dict(known.net.state_dict())
        return net.eval()

    answer = Predictor(make, tmp_path / "facts")({"image": pixels(4, 9)[0]})
    assert len(answer["class"]) == 4


def test_threads(known):
    predictor, images = Predictor(known.net, known.facts, stream="s"), pixels(32, 10)[0]
    alone = {}
    for name in ("a", "b"):
        live = Predictor(known.net, known.facts)
        alone[name] = [
            live({"image": part})["probability"].tolist()
            for part in images.reshape(4, 8, *images.shape[1:])
        ]
    found = {"a": [], "b": []}

    def work(name):
        for part in images.reshape(4, 8, *images.shape[1:]):
            answer = predictor({"image": part, "s": [name] * 8})
            found[name].append(answer["probability"].tolist())

    threads = [threading.Thread(target=work, args=(name,)) for name in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_answers_can_be_sent(predictor):
    answer = predictor({"image": pixels(3, 1)[0]})
    assert pickle.loads(pickle.dumps(answer)).keys() == answer.keys()


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"picture": []}, "without images in 'image'. It has: picture"),
        ({"image": []}, "at least one image"),
        (
            {"image": np.zeros((2, 8, 8, 3), np.uint8), "id": [1]},
            "column 'id', must be of 2 values",
        ),
        ({"image": np.zeros((2, 8, 8, 3), np.int64)}, "image 0, must be bytes, a path"),
        ({"image": [3]}, "image 0, must be bytes"),
        ({"image": np.zeros((2, 9, 9, 3), np.uint8)}, "must be .B, 3, 8, 8."),
        (
            {"image": [np.zeros((8, 8, 3), np.uint8), np.zeros((9, 8, 3), np.uint8)]},
            "must be of one size",
        ),
    ],
    ids=range(7),
)
def test_mistakes(predictor, batch, says):
    with pytest.raises(BatchError, match=says):
        predictor(batch)


def test_mistakes_of_the_construction(known):
    with pytest.raises(SettingError, match="top, must be at most 3"):
        Predictor(known.net, known.facts, top=4)
    with pytest.raises(BatchError, match="without a column 'camera'"):
        Predictor(known.net, known.facts, stream="camera")({"image": pixels(3, 1)[0]})
