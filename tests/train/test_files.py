"""Trainings on images that are decoded on access, with and without pretrained weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.train import toy
from twoshift.calibration import crossfit
from twoshift.data import load
from twoshift.errors import DataCorrupt, DataError, SettingError, StorageError
from twoshift.models.head import find_head
from twoshift.storage import sha256
from twoshift.train import loop, reading
from twoshift.train.adapter import source_images, train_adapter
from twoshift.train.checkpoint import load_source
from twoshift.train.source import train_source


def recipe(**changes):
    return toy.source_recipe(**{"dataset": toy.FILES, "ratio": 1, "epochs": 2, **changes})


@pytest.fixture(scope="module")
def trained(registered_toys, tmp_path_factory):
    """On files of another size than their default; read it, never write to it."""
    folder = tmp_path_factory.mktemp("files") / "source"
    decoding = {"size": 10, "frame": 14}
    return folder, train_source(recipe(epochs=5, lr=0.1, decoding=decoding), folder)


def test_all_images_are_trained_on_however_unequal_the_classes(trained):
    card = trained[1].card
    full = load(toy.FILES, "train")
    assert card.class_counts == full.counts.tolist()
    assert len(set(card.class_counts)) > 1
    assert card.subset["images"] == len(full)
    assert card.measured == {}


def test_images_are_decoded_as_the_recipe_says_for_every_later_use(trained):
    card = trained[1].card
    assert card.recipe["decoding"] == {"size": 10, "frame": 14}
    again = source_images(trained[1])
    assert again.images.shape == (card.subset["images"], 10, 10, 3)
    assert again.images.frames.shape[1] == 14


def test_the_normalisation_is_that_of_the_decoded_images(trained):
    pixels = source_images(trained[1]).images[:] / 255
    assert trained[1].card.settings["mean"] == pytest.approx(pixels.mean((0, 1, 2)), abs=1e-4)
    assert trained[1].card.settings["std"] == pytest.approx(pixels.std((0, 1, 2)), abs=1e-4)


@pytest.mark.parametrize("augment", ["crop_flip", "resized_crop_flip"])
def test_a_training_never_asks_for_more_than_a_part(tmp_path, monkeypatch, augment):
    sizes = []
    real = toy.Framed.framed

    def framed(self, rows):
        frames = real(self, rows)
        sizes.append(len(frames))
        return frames

    monkeypatch.setattr(toy.Framed, "framed", framed)
    monkeypatch.setattr(reading, "MAX_IMAGES", 40)
    source = train_source(recipe(ratio=4, augment=augment), tmp_path / "source")
    train_adapter(source, toy.adapter_recipe(augment=augment), tmp_path / "adapter")
    assert sizes
    assert max(sizes) == 40


def test_files_and_memory_train_the_same_weights(tmp_path, monkeypatch):
    first = train_source(recipe(augment="none", ratio=3), tmp_path / "files")
    in_memory = toy.toy_files

    def arrays(split, root, *, size=12, frame=16, squash=True):
        files = in_memory(split, root, size=size, frame=frame, squash=squash)
        return toy.replace(files, images=files.images[:])

    monkeypatch.setitem(toy.datasets._entries, toy.FILES, arrays)
    second = train_source(recipe(augment="none", ratio=3), tmp_path / "arrays")
    assert first.weights == second.weights
    assert first.card.measured == second.card.measured != {}


def test_adapter_and_calibration_work_on_files(trained, tmp_path):
    source = trained[1]
    adapter = train_adapter(source, toy.adapter_recipe(augment="crop_flip"), tmp_path / "a")
    assert adapter.classes == toy.CLASSES
    copied = load_source(shutil.copytree(source.folder, tmp_path / "copy"))
    calibration = crossfit(copied, folds=2)
    assert calibration.running["samples"] == source.card.subset["images"]
    assert calibration.running["balanced_accuracy"] > 0.4  # chance is 0.25


def test_decoding_that_a_data_set_does_not_have_is_refused(tmp_path):
    with pytest.raises(SettingError, match="no setting 'size'"):
        train_source(recipe(dataset=toy.DATA, decoding={"size": 3}), tmp_path / "m")


# -- pretrained backbones ---------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path):
    """A file of weights for ten classes, as another library would have saved it."""
    torch.manual_seed(5)
    net = toy.ToyNet(classes=10)
    path = tmp_path / "data" / "weights" / "toy.pth"
    path.parent.mkdir(parents=True)
    torch.save(net.state_dict(), path)
    return path, net


@pytest.mark.parametrize("place", ["weights/toy.pth", "absolute"])
def test_a_training_starts_from_the_given_weights(tmp_path, weights, monkeypatch, place):
    path, net = weights
    starts = []
    real = loop.run_epoch

    def run_epoch(accelerator, module, *rest):
        starts.append({k: v.clone() for k, v in module.state_dict().items()})
        return real(accelerator, module, *rest)

    monkeypatch.setattr(loop, "run_epoch", run_epoch)
    chosen = recipe(epochs=1, pretrained=str(path) if place == "absolute" else place)
    source = train_source(chosen, tmp_path / "m", data=tmp_path / "data")
    for name, value in net.state_dict().items():
        assert torch.equal(starts[0][name], value) != name.startswith("fc."), name
    card = load_source(tmp_path / "m").card
    assert card.pretrained == source.card.pretrained == sha256(path)
    assert "mean" not in card.settings  # that of the pretrained network
    assert source.model.normalize.mean.flatten().tolist() == [0.5, 0.5, 0.5]


def test_missing_weights_are_named(tmp_path):
    with pytest.raises(StorageError, match=r"no weights in .*data/weights/none\.pth"):
        train_source(recipe(pretrained="weights/none.pth"), tmp_path / "m", data=tmp_path / "data")


def test_cards_of_older_versions_are_read():
    folder = Path(__file__).resolve().parents[2] / "checkpoints" / "cifar10-bn"
    assert "pretrained" not in json.loads((folder / "card.json").read_text())
    assert load_source(folder).card.pretrained is None


def test_the_backbone_learns_at_its_own_rate(tmp_path):
    """One step without momentum: its length is the rate times the gradient, which is the same."""
    one_step = {"epochs": 1, "batch_size": 500, "momentum": 0, "augment": "none"}
    one_step |= {"weight_decay": 0, "schedule": "constant", "lr": 1}
    runs = {}
    for factor in (None, 0.1, 1.0):
        chosen = recipe(**one_step, backbone_lr=factor)
        runs[factor] = train_source(chosen, tmp_path / str(factor)).model.state_dict()
    settings = load_source(tmp_path / "None").card.settings
    torch.manual_seed(0)
    start = toy.ToyNet(**settings).state_dict()
    head = find_head(toy.ToyNet())[0]
    for name, value in start.items():
        if name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            continue
        step, slow, full = ((runs[f][name] - value) for f in (None, 0.1, 1.0))
        assert step.abs().max() > 0, name
        torch.testing.assert_close(full, step)
        expected = step if name.startswith(head) else 0.1 * step
        torch.testing.assert_close(slow, expected, rtol=1e-3, atol=1e-6, msg=name)


def test_a_training_at_two_rates_resumes_exactly(tmp_path):
    class Stop(Exception):
        pass

    def stop(done, total, facts):
        if done == 1:
            raise Stop

    chosen = recipe(epochs=3, backbone_lr=0.2, schedule="steps", milestones=[2])
    calm = train_source(chosen, tmp_path / "calm")
    with pytest.raises(Stop):
        train_source(chosen, tmp_path / "stopped", progress=stop)
    assert train_source(chosen, tmp_path / "stopped").weights == calm.weights


# -- files that cannot be read ----------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path):
    """A folder of real image files, one of them truncated."""
    rng = np.random.default_rng(0)
    for name in ("left", "right"):
        folder = tmp_path / "pictures" / name
        folder.mkdir(parents=True)
        for i in range(8):
            noise = rng.integers(0, 255, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / f"{i}.png")
    broken = tmp_path / "pictures" / "left" / "3.png"
    broken.write_bytes(broken.read_bytes()[:200])
    return tmp_path / "pictures"


def test_an_unreadable_image_stops_a_training_or_is_skipped_and_counted(tmp_path, pictures):
    chosen = recipe(
        dataset=f"folder:{pictures}", decoding={"size": 12, "frame": 16}, batch_size=4, epochs=1
    )
    with pytest.raises((DataCorrupt, DataError), match=r"3\.png"):
        train_source(chosen, tmp_path / "m")
    source = train_source(chosen, tmp_path / "m", skip_bad=True)
    assert source.card.subset["skipped"] == 1
    assert source.card.class_counts == [7, 8]
    assert source_images(source).counts.tolist() == [7, 8]
    assert crossfit(source, folds=0).running["samples"] == 15
    adapter = train_adapter(source, toy.adapter_recipe(epochs=1), tmp_path / "a")
    assert adapter.classes == 2
