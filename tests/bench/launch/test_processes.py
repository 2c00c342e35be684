from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.bench.launch.toys import asks, make_cells, make_model, numbers
from twoshift.bench.cell import Cell
from twoshift.bench.launch.base import pixels_of, weights_of
from twoshift.bench.launch.processes import WORKERS, _Piles, launch_processes
from twoshift.errors import SettingError

KILL, CRASH = signal.SIGKILL.value, signal.SIGSEGV.value


def test_whatever_happens_every_cell_has_one_outcome(workshop, local):
    """Good cells, a wrong one, workers killed once, and again and again: one crew for all."""
    once = asks(killed=1, signal=KILL, name="once")
    always = asks(killed=9, signal=CRASH, name="always")
    wrong = asks(error="it hurts")
    told_workers = asks(environment=WORKERS)
    cells, seen = [wrong, told_workers, once, *make_cells(), always], []
    told = lambda *batches: seen.append(batches)  # noqa: E731
    outcomes = list(launch_processes(workshop, cells, workers=2, retries=1, progress=told))
    by_key = {outcome.cell.key: outcome for outcome in outcomes}
    assert len(outcomes) == len(by_key) == len(cells)

    assert "ValueError: it hurts" in by_key[wrong.key].error
    assert by_key[told_workers.key].error.endswith("ValueError: 2\n")
    assert by_key[always.key].result is None
    assert "died 2 times, the last time by SIGSEGV" in by_key[always.key].error
    assert (workshop.models / "always").read_text() == "xx"
    assert by_key[once.key].result is not None
    assert (workshop.models / "once").read_text() == "xx"

    good = [by_key[cell.key] for cell in make_cells()]
    assert numbers(good) == numbers(local)
    assert {outcome.result.facts["threads"] for outcome in good} == {1}
    batches = good[0].result.metrics["batches"]
    assert {(c.key, done, total) for c, done, total in seen} >= {
        (make_cells()[0].key, batches, batches)
    }
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_ctrl_c_ends_the_workers(workshop):
    def interrupt(*_):
        assert len(multiprocessing.active_children()) == 1
        raise KeyboardInterrupt

    workshop.models.mkdir(exist_ok=True)
    cells = [asks(sleeps=600, name="sleeper")]
    with pytest.raises(KeyboardInterrupt):
        list(launch_processes(workshop, cells, workers=2, progress=interrupt))
    assert not multiprocessing.active_children()


def test_no_cells_need_no_workers(workshop):
    assert list(launch_processes(workshop, [])) == []


def test_some_workers_are_needed(workshop):
    with pytest.raises(SettingError, match="workers, must be at least 1, got 0"):
        list(launch_processes(workshop, make_cells(), workers=0))


def test_a_worker_keeps_to_its_model_and_its_images():
    cells = [
        Cell("source", corruption=corruption, seed=seed, model=make_model(model))
        for seed in range(2)
        for model in range(2)
        for corruption in ("fog", "clean")
    ]
    piles = _Piles(cells)

    def name(job):
        return weights_of(cells[job]), pixels_of(cells[job])

    first, job = piles.take(None, [])
    assert name(job) == first
    second, other = piles.take(None, [(first, job)])
    assert second[0] != first[0]  # another model
    others = [(second, other)]
    taken = [piles.take(first, others)[0] for _ in range(3)]
    assert taken[0] == first
    assert taken[1][0] == taken[2][0] == first[0]  # its model's other images
    assert taken[1] == taken[2] != first
    helped, job = piles.take(first, others)  # all done there: it helps the other
    assert helped[0] == second[0]
    assert helped != second
    piles.put_back(helped, job)
    assert piles.take(helped, others) == (helped, job)
    rest = [piles.take(first, others) for _ in range(3)]
    assert rest[-1] is None
    assert None not in rest[:2]


def test_workers_do_not_wait_for_each_others_adapters():
    models = [replace(make_model(0), adapter={"points": n}) for n in (3, 5)]
    cells = [
        Cell("tent", adapter=adapter, corruption=corruption, model=model)
        for corruption in ("fog", "clean")
        for model in models
        for adapter in ("trained", "identity")
    ]
    piles = _Piles(cells)

    def adapter(taken):
        cell = cells[taken[1]]
        return cell.model.adapter["points"] if cell.adapter == "trained" else None

    first = piles.take(None, [])
    second = piles.take(None, [first])
    assert first[0] != second[0]  # other images
    assert (adapter(first), adapter(second)) == (3, None)  # the other one's is in use
    second = piles.take(second[0], [first])
    assert adapter(second) == 5
    assert adapter(piles.take(first[0], [second])) is None
    assert adapter(piles.take(first[0], [second])) is None
    assert adapter(piles.take(first[0], [second])) == 5  # nothing else is left there
    assert [piles.take(None, []) is None for _ in range(3)] == [False, False, True]


ORPHAN = """
import sys
from pathlib import Path
from tests.bench.launch.toys import Toy, asks
from twoshift.bench.launch.processes import launch_processes
if __name__ == "__main__":
    list(launch_processes(Toy(Path(sys.argv[1])), [asks(sleeps=600, name="orphan")], workers=1))
"""


@pytest.mark.slow
def test_a_killed_parent_leaves_no_worker(tmp_path):
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen([sys.executable, script, tmp_path], env=environment)
    mark = tmp_path / "orphan"
    try:
        assert _becomes(lambda: mark.exists() and mark.read_text())
        worker = int(mark.read_text())
    finally:
        parent.kill()
        parent.wait()
    assert _becomes(lambda: not _alive(worker))


def _becomes(condition, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not (now := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return bool(now)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
