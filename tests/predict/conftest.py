"""What the tests of predictions share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.predict.small import Known, known_of, make_group_net, make_net, write_images
from twoshift.predict.build import Ready


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """What is synced when is tested with the storage."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def known() -> Known:
    return known_of(make_net)


@pytest.fixture
def known_groups() -> Known:
    """The same without batch normalisation."""
    return known_of(make_group_net)


@pytest.fixture
def ready(known) -> Ready:
    return known.ready()


@pytest.fixture
def images(tmp_path) -> Path:
    """150 images in two folders, of which the 21st is damaged."""
    write_images(tmp_path / "images", 150)
    (tmp_path / "images" / "x" / "0020.png").write_bytes(b"\x89PNG and then nothing")
    return tmp_path / "images"
