"""The page about predictions: its commands and its Python, run on small images."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tests.documents import commands, run_python
from tests.predict.small import CLASSES, known_of, make_net, pixels
from twoshift import cli

PAGE = "docs/predict.md"
MY_NET = """
from tests.predict.small import make_net as make_model
"""


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """Labelled photographs, two days of a camera, and a trained model."""
    monkeypatch.chdir(tmp_path)
    for folder, count, seed, dark in (
        ("photos", 240, 1, 1.0),
        ("camera", 60, 2, 0.6),
        ("later", 20, 3, 0.6),
    ):
        for i, (image, label) in enumerate(zip(*pixels(count, seed, dark), strict=True)):
            place = tmp_path / folder / (CLASSES[label] if folder == "photos" else "")
            place.mkdir(parents=True, exist_ok=True)
            large = Image.fromarray(image).resize((64, 64), Image.Resampling.NEAREST)
            large.save(place / f"{i}.png")
    (tmp_path / "my_net.py").write_text(MY_NET)
    torch.save(known_of(make_net).net.state_dict(), tmp_path / "my_model.pth")
    return tmp_path


def run(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["twoshift", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    assert end.value.code in (0, None), said.err
    return said.out


def in_this_process(arguments) -> bool:
    return "--launch" not in arguments


@pytest.mark.filterwarnings("ignore::twoshift.errors.TwoshiftWarning")
def test_commands_and_python(desk, monkeypatch, capsys):
    tried = [a for a in commands(PAGE) if in_this_process(a)]
    for arguments in tried:
        run(arguments, monkeypatch, capsys)
    made = {arguments[arguments.index("-o") + 1] for arguments in tried[1:]}
    assert made == {"predictions.csv", "monday.csv", "tuesday.csv", "tent.csv", "offline.csv"}
    assert all((desk / name).is_file() for name in made)
    assert (desk / "state" / "card.json").exists()
    images = np.random.default_rng(0).integers(0, 255, (5, 64, 64, 3), np.uint8)
    given = {"model": known_of(make_net).net, "pixels": images, "ids": np.arange(5)}
    space = run_python(PAGE, **given)
    assert space["answer"]["probabilities"].shape == (5, 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::twoshift.errors.TwoshiftWarning")
def test_commands_with_other_processes(desk, monkeypatch, capsys):
    calibrate = commands(PAGE)[0]
    run(calibrate, monkeypatch, capsys)
    for arguments in commands(PAGE):
        if not in_this_process(arguments):
            run(arguments, monkeypatch, capsys)
            assert (desk / "two.csv").is_file()
