"""The toy data set and backbone, known only while these tests run."""

from __future__ import annotations

import pytest

from tests.train import toy
from twoshift.train.source import train_source


@pytest.fixture(scope="package", autouse=True)
def registered_toys():
    toy.register()
    yield
    toy.unregister()


@pytest.fixture(scope="package")
def source_folder(registered_toys, tmp_path_factory):
    """A trained source model; read it, never write to it."""
    folder = tmp_path_factory.mktemp("source") / "model"
    train_source(toy.source_recipe(epochs=8, lr=0.1), folder)
    return folder
