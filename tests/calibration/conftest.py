"""A source model that was trained on the toy data, and its calibration."""

from __future__ import annotations

import shutil

import pytest

from tests.train.conftest import registered_toys, source_folder
from twoshift.calibration import crossfit
from twoshift.train import loop
from twoshift.train.checkpoint import load_source

__all__ = ["registered_toys", "source_folder"]

FOLDS = 2


@pytest.fixture(scope="package")
def calibrated_folder(source_folder, tmp_path_factory):
    """A calibrated source model; read it, never write to it."""
    folder = shutil.copytree(source_folder, tmp_path_factory.mktemp("calibrated") / "model")
    crossfit(load_source(folder), folds=FOLDS)
    return folder


@pytest.fixture
def source(source_folder, tmp_path):
    """A source model that was never calibrated, in a folder of its own."""
    return load_source(shutil.copytree(source_folder, tmp_path / "model"))


@pytest.fixture
def calibrated(calibrated_folder, tmp_path):
    """A calibrated source model in a folder of its own."""
    return load_source(shutil.copytree(calibrated_folder, tmp_path / "calibrated"))


@pytest.fixture
def no_training(monkeypatch):
    def refuse(*_arguments, **_settings):
        raise AssertionError("trained")

    monkeypatch.setattr(loop, "run_epoch", refuse)
