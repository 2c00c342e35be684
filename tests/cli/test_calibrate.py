from __future__ import annotations

import re
import shutil

import pytest

from twoshift.calibration import calibration_of, fit_dart
from twoshift.calibration.facts import FROM_IMAGES, FROM_SHIFTS
from twoshift.train import loop
from twoshift.train.checkpoint import load_source


@pytest.fixture
def source(digits, tmp_path):
    return shutil.copytree(digits.source, tmp_path / "source")


def test_facts_are_computed_saved_and_printed(source, twoshift, monkeypatch):
    code, out, err = twoshift("calibrate", "--source", source, "--folds", 2)
    assert code == 0, err
    first, *modes = out.splitlines()
    assert first == f"calibration in {source}: held-out images"
    calibration = calibration_of(load_source(source))
    assert calibration.folds == 2
    for line, mode in zip(modes, ("running", "batch"), strict=True):
        facts = calibration.of(mode)
        assert line.split()[0] == mode
        names = ("accuracy", "balanced_accuracy", "temperature", "confidence_threshold")
        printed = [float(v) for v in re.findall(r"\d+\.\d+", line)]
        assert printed == pytest.approx([facts[name] for name in names], abs=1e-3)
    weights = dict(load_source(source).model.named_parameters())
    assert calibration.facts.keys() == {*FROM_IMAGES, *FROM_SHIFTS}
    assert all(len(v) == weights[k].numel() for k, v in calibration.facts["fisher"].items())
    assert all(f"{k}.weight" in weights for k in calibration.facts["moments"])

    def refuse(*_arguments, **_settings):
        raise AssertionError("trained again")

    monkeypatch.setattr(loop, "run_epoch", refuse)
    assert twoshift("calibrate", "--source", source, "--folds", 2)[:2] == (0, out)


def test_without_folds_it_says_that_they_are_training_images(source, twoshift):
    code, out, _ = twoshift("calibrate", "--source", source, "--folds", 0)
    assert code == 0
    assert out.splitlines()[0].endswith("training images")


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--folds", "1"], "folds, must be 0 or at least 2"), (["--source", "no"], "no source model")],
)
def test_a_wrong_option_is_a_sentence(source, twoshift, options, says):
    code, out, err = twoshift("calibrate", "--source", source, *options)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_what_takes_minutes_is_computed_on_demand(source, twoshift, monkeypatch):
    def quick(model, images, progress):
        return fit_dart(model, images, epochs=1, batches=2, hidden=4, progress=progress)

    monkeypatch.setattr("twoshift.calibration.facts.fit_dart", quick)
    command = ["calibrate", "--source", source, "--folds", 0]
    assert twoshift(*command)[0] == 0
    assert "dart" not in calibration_of(load_source(source)).facts
    code, _, err = twoshift(*command, "--also", "dart")
    assert code == 0, err
    assert len(calibration_of(load_source(source)).facts["dart"]["hidden_bias"]) == 4
    options = ["--source", source, "--method", "dart", "--labels", "backward-10", "--json"]
    code, out, err = twoshift("run", *options, "--set", "method=tent")
    assert code == 0, err
    assert '"method": "dart"' in out
    code, out, err = twoshift(*command, "--also", "fisher")
    assert (code, out) == (2, "")
    assert "also of a calibration, must be one of 'dart'" in err
