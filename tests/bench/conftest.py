from __future__ import annotations

from pathlib import Path

import pytest

from twoshift.bench.store import Store


@pytest.fixture
def path(tmp_path) -> Path:
    """Where a store will be."""
    return tmp_path / "new" / "results.db"


@pytest.fixture
def store(path):
    with Store(path) as opened:
        yield opened
