from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.launch.toys import Toy, make_cells
from twoshift.bench.launch import Outcome
from twoshift.bench.launch.local import launch_local


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    """A folder in which models and images have been made by the first who wanted them."""
    return tmp_path_factory.mktemp("launch")


@pytest.fixture
def workshop(home) -> Toy:
    return Toy(home / "models", home / "data")


@pytest.fixture(scope="session")
def local(home) -> list[Outcome]:
    """What the others must give, too."""
    return list(launch_local(Toy(home / "models", home / "data"), make_cells()))
