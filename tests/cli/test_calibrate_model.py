"""``twoshift calibrate --model``: any classifier, from files, with facts that can be used."""

from __future__ import annotations

import json
import os
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch

import twoshift as package
from tests.calibration.trained import trained
from tests.data.trees import write_image
from twoshift import models
from twoshift.calibration import Calibration
from twoshift.errors import TwoshiftWarning

MY_NET = """
from tests.calibration.trained import make_net

def make_model(classes=10):
    return make_net(classes)

def in_a_dictionary():
    from torch import nn
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()
        def forward(self, x):
            return {"features": x.mean((2, 3)).expand(-1, 10), "scores": self.net(x)}
    return Named()
"""


class Desk(NamedTuple):
    """What a user has: a file with a function, weights, images, and the network itself."""

    folder: object
    net: torch.nn.Module
    options: list[object]


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Desk:
    monkeypatch.setenv("TWOSHIFT_DATA", str(tmp_path / "data"))
    known = trained("cross_entropy")
    (tmp_path / "my_net.py").write_text(MY_NET)
    torch.save(known.net.state_dict(), tmp_path / "w.pth")
    for name, part in (("seen", known.train), ("new", known.held_out)):
        images = np.asarray(part.images)
        np.savez(tmp_path / f"{name}.npz", images=images, labels=part.labels)
    options = ["--model", f"{tmp_path / 'my_net.py'}:make_model", "--weights", tmp_path / "w.pth"]
    options += ["--data", f"arrays:{tmp_path / 'new.npz'}", "--out", tmp_path / "facts"]
    return Desk(tmp_path, known.net, options)


def said(err: str) -> str:
    """What is on standard error beside the bar of the progress."""
    return "\n".join(line for line in err.splitlines() if not line.startswith("calibration "))


def changed(options: list[object], **others: object) -> list[object]:
    """The options with others in their place; None leaves one out."""
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    pairs |= {f"--{name.replace('_', '-')}": value for name, value in others.items()}
    return [part for pair in pairs.items() if pair[1] is not None for part in pair]


def test_a_function_of_ones_own_on_arrays(desk, twoshift):
    code, out, err = twoshift("calibrate", *desk.options)
    assert (code, said(err)) == (0, "")
    first, *lines = out.splitlines()
    assert first == f"facts in {desk.folder / 'facts'}"
    assert [line.split()[0] for line in lines[:4]] == ["running", "batch", "head", "labels"]
    assert "those of the training are in the logits" in out
    facts = Calibration.load(desk.folder / "facts")
    assert f"accuracy {facts.running['accuracy']:.4f}" in lines[0]
    assert facts.held_out
    live = package.recommended(desk.net, desk.folder / "facts")
    assert "Streamed" in live.describe()
    assert live(torch.rand(4, 1, 28, 28)).shape == (4, 10)


def test_images_of_the_training_warn_once_and_held_out_ones_do_not(desk, twoshift, monkeypatch):
    monkeypatch.setattr("twoshift.calibration.fit.looks_trained_on", lambda *_: True)
    seen = changed(desk.options, data=f"arrays:{desk.folder / 'seen.npz'}")
    code, _, err = twoshift("calibrate", *seen)
    assert code == 0
    assert said(err).startswith("warning: the model looks as if")
    assert len(said(err).splitlines()) == 1
    assert "as --held-out; or" in err
    assert not Calibration.load(desk.folder / "facts").held_out
    held_out = changed(seen, held_out=f"arrays:{desk.folder / 'new.npz'}")
    code, _, err = twoshift("calibrate", *held_out)
    assert (code, said(err)) == (0, "")
    assert Calibration.load(desk.folder / "facts").held_out


def test_a_warning_is_said_once(desk, twoshift, monkeypatch):
    real = package.calibrate

    def warned(*arguments, **settings):
        for _ in range(2):
            warnings.warn("state source_prior=", TwoshiftWarning, stacklevel=1)
        return real(*arguments, **settings)

    monkeypatch.setattr("twoshift.calibration.calibrate", warned)
    code, _, err = twoshift("calibrate", *desk.options)
    assert (code, said(err)) == (0, "warning: state --source-prior")


def test_counts_mean_and_output(desk, twoshift):
    counts = np.arange(10, 110, 10)[::-1]
    options = changed(
        desk.options,
        model=f"{desk.folder / 'my_net.py'}:in_a_dictionary",
        class_counts=",".join(map(str, counts)),
        output="scores",
        mean=0.1,
        std="0.9",
    )
    net = torch.nn.ModuleDict({"net": desk.net})
    torch.save(net.state_dict(), desk.folder / "w.pth")
    code, _, err = twoshift("calibrate", *options)
    assert code == 0, err
    facts = Calibration.load(desk.folder / "facts")
    assert facts.classifier.prepared == {"output": "scores", "mean": [0.1], "std": [0.9]}
    assert facts.facts["class_counts"].tolist() == counts.tolist()


def test_labels_that_cannot_tell(desk, twoshift):
    known = trained("cross_entropy").held_out
    few = np.concatenate([np.flatnonzero(known.labels == c)[:3] for c in range(10)])
    few = np.random.default_rng(0).permutation(few)
    images = np.asarray(known.images)[few]
    np.savez(desk.folder / "equal.npz", images=images, labels=known.labels[few])
    options = changed(desk.options, data=f"arrays:{desk.folder / 'equal.npz'}")
    code, out, err = twoshift("calibrate", *options)
    assert (code, out) == (2, "")
    assert "equally frequent labels" in err
    assert "Pass --class-counts, the number" in err
    assert "--source-prior uniform." in err
    assert not (desk.folder / "facts").exists()
    assert twoshift("calibrate", *options, "--source-prior", "uniform")[0] == 0


def test_a_statement_that_the_images_contradict(desk, twoshift):
    code, _, err = twoshift("calibrate", *desk.options, "--source-prior", "uniform")
    assert code == 2
    assert "stated to be 'uniform', but the images say 'training'" in err


@pytest.fixture
def photos(tmp_path):
    for label, count in enumerate((30, 12, 5)):
        for i in range(count):
            write_image(tmp_path / "photos" / "abc"[label] / f"{i}.png", label, i)
    return f"folder:{tmp_path / 'photos'}"


@pytest.fixture
def ours(tmp_path, photos):
    torch.manual_seed(0)
    net = models.create("resnet18", classes=3, width=4).eval()
    torch.save(net.state_dict(), tmp_path / "w.pth")
    options = ["--model", "resnet18", "--weights", tmp_path / "w.pth", "--set", "width=4"]
    options += ["--data", photos, "--size", 32, "--out", tmp_path / "facts"]
    return net, options


def test_one_of_our_names_on_a_folder(ours, twoshift, tmp_path):
    net, options = ours
    code, _, err = twoshift("calibrate", *options)
    assert code == 0, err
    facts = Calibration.load(tmp_path / "facts")
    assert facts.classifier.classes == ("a", "b", "c")
    assert facts.classifier.inputs.size == (32, 32)
    assert package.recommended(net, tmp_path / "facts")(torch.rand(2, 3, 32, 32)).shape == (2, 3)


def test_images_that_cannot_be_read(ours, twoshift, tmp_path):
    path = tmp_path / "photos" / "a" / "3.png"
    path.write_bytes(path.read_bytes()[:60])
    code, out, err = twoshift("calibrate", *ours[1])
    assert (code, out) == (2, "")
    assert str(path) in err
    code, out, err = twoshift("calibrate", *ours[1], "--skip-bad")
    assert code == 0, err
    assert "skipped  1 images that cannot be read" in out
    assert Calibration.load(tmp_path / "facts").classifier.images == 46


def test_a_folder_of_hugging_face(photos, twoshift, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    net = transformers.ResNetForImageClassification(config).eval()
    net.save_pretrained(tmp_path / "net")
    normalised = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (tmp_path / "net" / "preprocessor_config.json").write_text(json.dumps(normalised))
    where = ["--data", photos, "--size", 32, "--out", tmp_path / "facts"]
    code, out, err = twoshift("calibrate", "--model", f"hf:{tmp_path / 'net'}", *where)
    assert code == 0, err
    assert "head     net.classifier.1" in out


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"data": None}, "must be given --data. Example: twoshift calibrate --model"),
        ({"out": None}, "must be given --out. Example"),
        ({"model": None}, "must be given --model or --source, got neither"),
        ({"source": "x"}, "must be given --model or --source, got both"),
        ({"model": None, "source": "x"}, "calibrate --source has no option --weights"),
        ({"folds": 3}, "calibrate --model has no option --folds"),
        ({"model": "{}/my_net.py:make_modell"}, "Did you mean 'make_model'?"),
        ({"model": "{}/my_net.py"}, "my_net.py:FUNCTION"),
        ({"model": "{}/absent.py:make"}, "no file"),
        ({"model": "resnet81"}, "Did you mean 'resnet18'?"),
        ({"model": "resnet18", "weights": None}, "weights of resnet18, must be given"),
        ({"set": "clases=3"}, "unexpected keyword argument 'clases'"),
        ({"set": "classes=3"}, "must be 10, as in the data, got another number"),
        ({"set": "width"}, "must be NAME=VALUE"),
        ({"weights": "{}/absent.pth"}, "no weights in"),
        ({"weights": "{}/my_net.py"}, "is damaged"),
        ({"data": "foldr:x"}, "Did you mean 'folder'?"),
        ({"data": "folder:{}/absent"}, "absent"),
        ({"data": "arrays:{}/absent.npz"}, "absent.npz"),
        ({"split": "trian"}, "trian"),
        ({"held_out": "arrays:{}/absent.npz"}, "absent.npz"),
        ({"class_counts": "3,4"}, "must be 10 numbers, one for each class, got 2"),
        ({"class_counts": "many"}, "--class-counts, must be numbers"),
        ({"class_counts": "0,0,0,0,0,0,0,0,0,0"}, "class_counts"),
        ({"class_counts": "nan,1,1,1,1,1,1,1,1,1"}, "class_counts"),
        ({"source_prior": "unifrom"}, "Did you mean 'uniform'?"),
        ({"mean": "a,b"}, "--mean, must be numbers"),
        ({"mean": "0.1,0.2"}, "must be one value, or 1 as the images have channels"),
        ({"std": "0"}, "must be positive"),
        ({"head": "3"}, "must be an nn.Linear"),
        ({"head": "fc"}, "Its linear layers: 8"),
        ({"output": "logits"}, "has no entry 'logits'"),
        ({"out": "{}/w.pth"}, "must be a folder that can be written"),
        ({"out": "{}/w.pth/facts"}, "must be a folder that can be written"),
    ],
    ids=str,
)
def test_mistakes_are_sentences(desk, twoshift, others, says):
    given = {k: v.format(desk.folder) if isinstance(v, str) else v for k, v in others.items()}
    code, out, err = twoshift("calibrate", *changed(desk.options, **given))
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err
    assert not (desk.folder / "facts").exists()


@pytest.mark.parametrize("classes", [7, 12])
def test_a_network_with_another_number_of_classes(desk, twoshift, classes):
    options = changed(desk.options, weights=None, set=f"classes={classes}")
    code, out, err = twoshift("calibrate", *options)
    assert (code, out) == (2, "")
    assert "class" in err
    assert "Traceback" not in err


def test_a_folder_that_cannot_be_written_is_noticed_before_the_work(desk, twoshift, monkeypatch):
    def refuse(*_arguments, **_settings):
        raise AssertionError("calibrated")

    monkeypatch.setattr("twoshift.calibration.calibrate", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    code, _, err = twoshift("calibrate", *desk.options)
    assert code == 2
    assert "must be a folder that can be written" in err


def test_what_is_said_when_it_is_stopped(desk, twoshift, monkeypatch):
    def stop(*_arguments, **_settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("twoshift.calibration.calibrate", stop)
    code, _, err = twoshift("calibrate", *desk.options)
    assert (code, said(err)) == (130, "Stopped. No facts were written.")
    monkeypatch.setattr("twoshift.train.checkpoint.load_source", stop)
    code, _, err = twoshift("calibrate", "--source", desk.folder)
    assert (code, said(err)) == (
        130,
        "Stopped. The same command continues: what was trained is kept.",
    )
