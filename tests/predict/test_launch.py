"""Parts that others run: the same table, whoever runs them and whoever dies."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch

from tests.predict.small import MY_NET, SIDE, known_of, make_net, write_images
from twoshift.errors import DataMissing, MissingExtra, ModelError, SettingError
from twoshift.predict import launch
from twoshift.predict.build import Recipe
from twoshift.predict.inputs import open_gallery
from twoshift.predict.launch import launcher
from twoshift.predict.run import Options, predict
from twoshift.predict.shards import Opening, do_elsewhere

OPTIONS = {"batch_size": 16, "part": 64, "passes": 2}


@pytest.fixture
def opening(tmp_path, monkeypatch) -> Opening:
    """Images of five parts, and how a worker opens them."""
    monkeypatch.setattr("twoshift.predict.plan.CHUNK", 32)
    known = known_of(make_net)
    (tmp_path / "my_net.py").write_text(MY_NET)
    torch.save(known.net.state_dict(), tmp_path / "w.pth")
    known.facts.save(tmp_path / "facts")
    write_images(tmp_path / "images", 48)
    paths = sorted(map(str, (tmp_path / "images").rglob("*.png")))
    (tmp_path / "list.txt").write_text("\n".join(paths * 6))
    recipe = Recipe(
        model=f"{tmp_path / 'my_net.py'}:make_net",
        weights=str(tmp_path / "w.pth"),
        calibration=str(tmp_path / "facts"),
        decoding={"frame": SIDE},
    )
    source = f"list:{tmp_path / 'list.txt'}"
    return Opening(recipe, source, {}, open_gallery(source).identity())


def run(opening: Opening, out: Path, how=None) -> bytes:
    predict(
        opening.recipe.open(), open_gallery(opening.source), Options(out, **OPTIONS), launch=how
    )
    return out.read_bytes()


class Pool:
    """A pool that runs at once, and dies at the tasks with some numbers."""

    deadly: list[int] = []  # noqa: RUF012

    def __init__(self, *_):
        self.dead = False

    def submit(self, function, opening, task):
        future: Future = Future()
        if task.number in self.deadly:
            self.deadly.remove(task.number)
            self.dead = True
        if self.dead:
            future.set_exception(BrokenProcessPool())
        else:
            future.set_result(function(opening, task))
        return future

    def shutdown(self, **_):
        pass


def test_a_pool_that_breaks_is_replaced(opening, tmp_path, monkeypatch):
    alone = run(opening, tmp_path / "alone.csv")
    monkeypatch.setattr(launch, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(Pool, "deadly", [0, 2, 2, 3])
    how = launcher("processes", opening, workers=2)
    assert run(opening, tmp_path / "out.csv", how) == alone
    assert Pool.deadly == []
    monkeypatch.setattr(Pool, "deadly", [1] * 9)
    with pytest.raises(ModelError, match=r"died 3 times in a row. If memory is short"):
        run(opening, tmp_path / "dead.csv", how)
    monkeypatch.setattr(Pool, "deadly", [])
    assert run(opening, tmp_path / "dead.csv", how) == alone  # goes on


def test_a_worker_without_the_data(opening):
    other = Opening(opening.recipe, opening.source, {}, "another")
    with pytest.raises(DataMissing, match=r"a worker finds other images in .* Every worker needs"):
        do_elsewhere(other, None)


def test_mistakes(opening, monkeypatch):
    assert launcher("local", opening) is None
    for words, says in (
        (("dusk", opening), "Did you mean 'dask'"),
        (("local", opening, 2), "--workers"),
        (("local", opening, None, "tcp://x"), "--scheduler"),
        (("dask", opening, 2, "tcp://x"), "has its own workers"),
    ):
        with pytest.raises(SettingError, match=says):
            launcher(*words)
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    with pytest.raises(MissingExtra, match=r"twoshift\[dask\]"):
        launcher("dask", opening)


def killing(how, victims):
    """Kills a worker while its first tasks run."""

    def wrapped(tasks):
        for i, found in enumerate(how(tasks)):
            yield found
            if i == 0:
                for process in victims():
                    os.kill(process, signal.SIGKILL)

    return wrapped


def children() -> list[int]:
    import psutil

    found = psutil.Process().children(recursive=True)
    busy = [p.pid for p in found if "spawn_main" in " ".join(p.cmdline())]
    return busy[:1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["processes", "dask"])
def test_the_same_bytes_even_if_a_worker_is_killed(opening, tmp_path, name):
    if name == "dask":
        pytest.importorskip("distributed")
    torch.set_num_threads(1)
    alone = run(opening, tmp_path / "alone.csv")
    how = launcher(name, opening, workers=2)
    assert run(opening, tmp_path / "two.csv", how) == alone
    assert run(opening, tmp_path / "killed.csv", killing(how, children)) == alone


@pytest.mark.slow
def test_a_scheduler_that_is_gone(opening, tmp_path):
    pytest.importorskip("distributed")
    how = launcher("dask", opening, scheduler="tcp://127.0.0.1:1")
    with pytest.raises(SettingError, match="the dask scheduler, must be running"):
        run(opening, tmp_path / "out.csv", how)
