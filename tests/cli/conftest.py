"""A source model and an adapter of 8x8 digits, trained in a second by the commands themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from twoshift import cli

SMALL_ADAPTER = ["--recipe", "demo", "--set", "epochs=1"]
SMALL = [*SMALL_ADAPTER, "--set", "dataset=digits8x8", "--set", "ratio=10"]


class Models(NamedTuple):
    """Folders; read them, never write to them."""

    source: Path
    adapter: Path
    printed: list[str]


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Models:
    folder = tmp_path_factory.mktemp("digits")
    source, adapter = folder / "source", folder / "adapter"
    printed = []
    for command in (
        ["train", "source", *SMALL, "--out", str(source)],
        ["train", "adapter", *SMALL_ADAPTER, "--source", str(source), "--out", str(adapter)],
    ):
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code == 0, result.exception
        printed.append(result.stdout)
    return Models(source, adapter, printed)


@pytest.fixture
def pictures(tmp_path) -> Path:
    """A folder of twelve images in two classes, the last of them truncated."""
    noise = np.random.default_rng(0)
    for i in range(12):
        path = tmp_path / "mine" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 255, (16, 16, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:100])
    return tmp_path / "mine"


def on_pictures(folder: Path) -> list[str]:
    """Options of a training on `pictures`."""
    change = [f"dataset=folder:{folder}", "ratio=1", "epochs=1", "batch_size=4"]
    change += ["decoding.size=12", "decoding.frame=16", "settings.width=16"]
    return ["--recipe", "demo", *(part for c in change for part in ("--set", c))]


@pytest.fixture
def twoshift(monkeypatch, capsys):
    """Run the installed entry point: (exit code, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["twoshift", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), *capsys.readouterr()

    return run
