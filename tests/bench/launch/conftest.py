from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.bench.launch.toys import Toy, make_cells
from twoshift.bench.launch import Outcome
from twoshift.bench.launch.local import launch_local


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """As many as workers have: the last digits depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    """A folder in which models and images have been made by the first who wanted them."""
    return tmp_path_factory.mktemp("launch")


@pytest.fixture
def workshop(home) -> Toy:
    return Toy(home / "models", home / "data")


@pytest.fixture(scope="session")
def local(home, one_thread) -> list[Outcome]:
    """What the others must give, too."""
    return list(launch_local(Toy(home / "models", home / "data"), make_cells()))
