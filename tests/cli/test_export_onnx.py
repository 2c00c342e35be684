"""``twoshift export onnx``: which images are compared on, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from twoshift import LabelAware, Paced, attach, calibrate, logit_adapter, recommended  # noqa: E402
from twoshift.errors import DataMissing  # noqa: E402
from twoshift.export.onnx import Exported  # noqa: E402
from twoshift.methods import Source  # noqa: E402
from twoshift.models.given import open_model  # noqa: E402
from twoshift.train.checkpoint import load_source  # noqa: E402

MY_NET = """
from torch import nn


def make(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 5),
    )
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """Weights of a model, its facts, and a state; read them, never write to them."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "my_net.py").write_text(MY_NET)
    torch.manual_seed(0)
    net = open_model(f"{folder / 'my_net.py'}:make", settings={"width": 4})
    g = torch.Generator().manual_seed(1)
    pairs = [(torch.rand(40, 3, 16, 16, generator=g), torch.arange(40) % 5) for _ in range(2)]
    known = {"source_prior": "uniform", "classes": list("abcde"), "simulate": False}
    facts = calibrate(net, pairs, held_out=pairs, **known)
    live = recommended(net, facts)
    live(pairs[0][0])
    facts.save(folder / "facts")
    live.save(folder / "state")
    save_file(net.state_dict(), folder / "weights.safetensors")
    save_file({n: t * 2 for n, t in net.state_dict().items()}, folder / "other.safetensors")
    return folder


def options(desk, weights="weights.safetensors", state="state"):
    model = ["--model", f"{desk / 'my_net.py'}:make", "--set", "width=4"]
    files = ["--weights", desk / weights, "--calibration", desk / "facts"]
    return [*model, *files, "--state", desk / state]


def test_images_in_a_folder_and_class_names(twoshift, desk, tmp_path):
    noise = np.random.default_rng(0)
    for i in range(3):
        path = tmp_path / "images" / f"day {i}" / "a.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(noise.integers(0, 255, (20, 24, 3), np.uint8)).save(path)
    out = tmp_path / "model.onnx"
    code, said, err = twoshift(
        "export", "onnx", *options(desk), "--images", tmp_path / "images", "-o", out
    )
    assert (code, err) == (0, "")
    assert f"{out}: opset 20, " in said
    assert f", on 3 images of {tmp_path / 'images'}\n" in said
    session = onnxruntime.InferenceSession(out.read_bytes())
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["twoshift.classes"]) == list("abcde")
    assert session.get_inputs()[0].shape == ["batch", 3, 16, 16]


def test_generated_images_where_nothing_else_is_known(twoshift, desk, tmp_path):
    out = tmp_path / "model.onnx"
    code, said, err = twoshift("export", "onnx", *options(desk), "--out", out)
    assert (code, err) == (0, "")
    assert said.endswith(", on 64 generated images\n")


@pytest.mark.parametrize("missing", [False, True])
def test_a_model_of_ours_is_compared_on_its_own_data(
    twoshift, digits, tmp_path, monkeypatch, missing
):
    compared = []

    def export(live, out, images, **known):
        compared.append((images, known))
        out.write_text("an ONNX file")
        return Exported(out, 20, len(images), 0.0)

    def nothing(*_arguments, **_settings):
        raise DataMissing("digits8x8")

    monkeypatch.setattr("twoshift.export.onnx.export_onnx", export)
    net = load_source(digits.source).model
    live = LabelAware(Source(attach(net, logit_adapter(net))), Paced(10))
    live.save(tmp_path / "state")
    if missing:
        monkeypatch.setattr("twoshift.data.load", nothing)
    given = ["--source", digits.source, "--state", tmp_path / "state", "-o", tmp_path / "m.onnx"]
    code, said, err = twoshift("export", "onnx", *given, *["--size", "8"][: 2 * missing])
    assert (code, err) == (0, "")
    whose = "generated images" if missing else "images of digits8x8"
    assert said.endswith(f", on 64 {whose}\n")
    (images, known) = compared[0]
    assert images.shape == (64, 1, 8, 8)
    assert known["classes"] == [str(i) for i in range(10)]
    if missing:
        code, _, err = twoshift("export", "onnx", *given)
        assert code == 2
        assert "--size 224" in err


def test_what_is_refused_leaves_no_file(twoshift, desk, tmp_path):
    out, known = ["-o", tmp_path / "m.onnx"], options(desk)
    (tmp_path / "empty").mkdir()
    state = ["--state", desk / "state"]
    for arguments, says in [
        ([*state, *out], "given --model or --source, got neither"),
        ([*known, "--source", desk, *out], "got both"),
        (["--source", desk, "--set", "width=4", *state, *out], "--weights or --set"),
        ([*known, "-o", tmp_path / "empty"], "must be a file, got a folder"),
        ([*known, "--images", tmp_path / "empty", *out], "no images in"),
        ([*known, "--images", "cifr10", *out], "cifar10"),
        ([*known, "--size", 20, *out], "must be (B, 3, 16, 16)"),
        ([*options(desk, state="nothing"), *out], "nothing"),
        ([*options(desk, weights="other.safetensors"), *out], "model"),
        (["--source", desk / "facts", *state, *out], "source model"),
    ]:
        code, said, err = twoshift("export", "onnx", *arguments)
        assert (code, said) == (2, ""), arguments
        assert says in err
        assert "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]
    assert not list((tmp_path / "empty").iterdir())


def test_a_stopped_export_wrote_no_file(twoshift, desk, monkeypatch, tmp_path):
    def stop(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("twoshift.export.onnx._serialised", stop)
    code, _, err = twoshift("export", "onnx", *options(desk), "-o", tmp_path / "m.onnx")
    assert (code, err.strip()) == (130, "Stopped. The file was not written.")
    assert not list(tmp_path.iterdir())
