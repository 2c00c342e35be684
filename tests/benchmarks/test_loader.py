import json

import numpy as np
import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from benchmarks import loader
from benchmarks.photographs import photograph
from twoshift.data import files


@pytest.fixture
def quick(monkeypatch):
    """The same benchmark on a few files and a network that costs nothing."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(loader, "THREADS", threads)
    monkeypatch.setattr(loader, "write_photographs", lambda f: write(f, 4))
    monkeypatch.setattr(loader.models, "create", lambda *_, **__: nn.Conv2d(3, 2, 1))
    yield
    torch.set_num_threads(threads)


write = loader.write_photographs


def test_photographs_are_smooth_but_not_too_smooth(tmp_path):
    image = photograph(np.random.default_rng(0), 375, 500).astype(float)
    assert image.shape == (375, 500, 3)
    assert 40 < image.std() < 70
    steps = [np.abs(image[:, by:] - image[:, :-by]).mean() for by in (1, 4, 16, 64)]
    assert steps == sorted(steps)
    (path,) = write(tmp_path, 1)
    assert 40_000 < path.stat().st_size < 250_000  # of ImageNet: about 110 kB


@pytest.mark.parametrize(("megabytes", "times"), [(100, 1), (0, 3)])
def test_cold_files_are_decoded_each_time_and_others_once(tmp_path, monkeypatch, megabytes, times):
    monkeypatch.delenv(files.CACHE_MB, raising=False)
    decoded = []
    whole = files._to_rgb
    monkeypatch.setattr(files, "_to_rgb", lambda image: decoded.append(image) or whole(image))
    candidate = loader.loading(write(tmp_path, 2), 32, megabytes)
    candidate.run()
    candidate.run()
    assert len(decoded) == 2 * times
    assert files.CACHE_MB not in loader.os.environ


def test_limits_are_ratios_of_the_same_run(monkeypatch):
    monkeypatch.setattr(
        loader, "take_turns", lambda *_: {"load": [1.0, 2.0, 3.0], "model": [4.0, 4.0, 4.0]}
    )
    ratio, load, model = loader.compared({"load": None, "model": None}, 3, 0.5)
    assert (ratio.name, ratio.value, ratio.high, ratio.ok) == ("load / model", 0.5, 0.5, True)
    assert (load.value, model.value) == (loader.BATCH / 2, loader.BATCH / 4)
    assert loader.compared({"load": None, "model": None}, 3, 0.375)[0].ok  # the lower quartile
    assert not loader.compared({"load": None, "model": None}, 3, 0.37)[0].ok


@pytest.mark.parametrize(("limit", "code"), [(1e9, 0), (0.0, 1)])
def test_a_broken_limit_is_the_exit_code(quick, monkeypatch, tmp_path, limit, code):
    monkeypatch.setattr(loader, "COLD", limit)
    monkeypatch.setattr(loader, "CACHED", 1e9)
    monkeypatch.setattr(loader, "PREDICTED", 1e9)
    app = typer.Typer()
    app.command()(loader.main)
    result = CliRunner().invoke(app, ["--quick", "--out", str(tmp_path / "speed.json")])
    assert result.exit_code == code, result.output
    assert "JPEG files, 224 px / ResNet-50" in result.output
    assert ("FAIL" in result.output) == bool(code)
    checks = json.loads((tmp_path / "speed.json").read_text())["checks"]
    assert all(check["ok"] for check in checks) == (code == 0)
