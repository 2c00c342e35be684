"""Several benches on one store: every cell is measured once, whoever dies on the way."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.bench.stored import make_result
from twoshift.bench import claims as claims_module
from twoshift.bench import run as run_module
from twoshift.bench.cell import Cell
from twoshift.bench.claims import Claims
from twoshift.bench.launch import Outcome
from twoshift.bench.launch.base import Claim
from twoshift.bench.launch.local import launch_local
from twoshift.bench.launch.processes import launch_processes
from twoshift.bench.result import Result
from twoshift.bench.run import run_cells
from twoshift.bench.store import Store
from twoshift.bench.workshop import Workshop, silent

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.bench.test_claims"])
CELLS = [make_result(seed).cell for seed in range(12)]


@dataclass
class Diary(Workshop):
    """Writes down whom it measures, and takes a while."""

    def run(self, cell: Cell, progress: Any = silent) -> Result:
        with (Path(self.models) / "diary").open("a") as file:
            file.write(f"{cell.seed} {os.getpid()}\n")
        time.sleep(float((Path(self.models) / "seconds").read_text()))
        return make_result(cell.seed)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "seconds").write_text("0.05")
    (tmp_path / "diary").touch()
    return tmp_path


def diary(folder: Path) -> list[tuple[int, int]]:
    lines = (folder / "diary").read_text().splitlines()
    return [(int(seed), int(pid)) for seed, pid in map(str.split, lines)]


def bench(folder: Path, launcher: str) -> None:
    run_module.PAUSE = 0.1
    launch = {"local": launch_local, "processes": launch_processes}[launcher]
    options = {"workers": 2} if launcher == "processes" else {}
    with Store(folder / "results.db") as store:
        summary = run_cells(
            CELLS, store, lambda cells, claim: launch(Diary(folder), cells, claim=claim, **options)
        )
    assert summary.failed == []
    assert len(CELLS) >= summary.done + summary.elsewhere
    (folder / f"{os.getpid()}.done").write_text(str(summary.done))


def two_benches(folder: Path, launcher: str) -> list:
    children = [processes.Process(target=bench, args=(folder, launcher)) for _ in range(2)]
    for child in children:
        child.start()
    return children


@pytest.mark.parametrize("launcher", ["local", pytest.param("processes", marks=pytest.mark.slow)])
def test_two_benches_measure_every_cell_once(folder, launcher):
    children = two_benches(folder, launcher)
    for child in children:
        child.join(100)
    assert [child.exitcode for child in children] == [0, 0]
    seeds = Counter(seed for seed, _ in diary(folder))
    assert seeds == Counter(cell.seed for cell in CELLS)
    done = [int((folder / f"{child.pid}.done").read_text()) for child in children]
    assert sum(done) == len(CELLS)
    assert min(done) > 0
    with Store(folder / "results.db") as store:
        assert store.keys() == {cell.key for cell in CELLS}
        assert stored_claims(store.path) == []


def wait_for(cells: int, folder: Path, child) -> None:
    while len(diary(folder)) < cells:
        assert child.is_alive()
        time.sleep(0.02)


def test_the_other_bench_finishes_the_cells_of_one_that_is_killed(folder):
    (folder / "seconds").write_text("600")
    victim = processes.Process(target=bench, args=(folder, "local"))
    victim.start()
    wait_for(1, folder, victim)
    (folder / "seconds").write_text("0")
    other = processes.Process(target=bench, args=(folder, "local"))
    other.start()
    wait_for(len(CELLS), folder, other)
    other.join(0.5)
    assert other.is_alive()  # it waits for the cell that it left to the victim
    victim.kill()
    victim.join()
    other.join(60)  # half the lease
    assert other.exitcode == 0
    seeds = [seed for seed, _ in diary(folder)]
    assert sorted(seeds) == sorted([cell.seed for cell in CELLS] + [seeds[0]])
    assert diary(folder)[-1] == (seeds[0], other.pid)
    with Store(folder / "results.db") as store:
        assert store.keys() == {cell.key for cell in CELLS}


def test_a_launcher_leaves_out_what_it_may_not_claim(folder):
    wanted = CELLS[:2]
    for launch in (launch_local, partial(launch_processes, workers=1)):
        assert list(launch(Diary(folder), CELLS, claim=lambda cell: False)) == []
        outcomes = list(launch(Diary(folder), CELLS, claim=lambda cell: cell in wanted))
        assert sorted(o.cell.seed for o in outcomes) == [cell.seed for cell in wanted]


def stored_claims(path: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT key, owner FROM claims").fetchall()


def test_a_claim_keeps_others_out_until_it_is_released(store, path):
    with Store(path) as other, Claims(store) as ours, Claims(other) as theirs:
        assert ours.take(CELLS[0])
        assert ours.take(CELLS[0])  # again, after a worker died
        assert not theirs.take(CELLS[0])
        assert theirs.take(CELLS[1])
        assert theirs.free(CELLS[:3]) == CELLS[1:3]
        assert ours.free(CELLS[:3]) == [CELLS[0], CELLS[2]]
        ours.__exit__()
        assert theirs.take(CELLS[0])


def test_what_has_been_measured_cannot_be_claimed(store, path):
    with Store(path) as other, Claims(store) as ours, Claims(other) as theirs:
        assert ours.take(CELLS[0])
        store.put(make_result(CELLS[0].seed))
        assert stored_claims(path) == []
        assert not theirs.take(CELLS[0])
        assert ours.take(CELLS[1])
        store.fail(CELLS[1], "it hurts")
        assert theirs.take(CELLS[1])


def change(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        assert db.execute(sql).rowcount == 1


def test_claims_of_the_dead_are_void(store, path):
    with Store(path) as other, Claims(store) as ours, Claims(other) as theirs:
        ours.take(CELLS[0])
        change(path, "UPDATE claims SET pid = 4194999")  # a number that no process has
        assert theirs.take(CELLS[0])
        ours.take(CELLS[1])
        change(path, f"UPDATE claims SET host = 'far', pid = 4194999 WHERE key = '{CELLS[1].key}'")
        assert not theirs.take(CELLS[1])  # whether it lives cannot be seen from here
        change(path, f"UPDATE claims SET until = 1 WHERE key = '{CELLS[1].key}'")
        assert theirs.take(CELLS[1])


def test_claims_are_renewed_while_a_cell_is_measured(store, path, monkeypatch):
    monkeypatch.setattr(claims_module, "LEASE", 0.6)
    with Store(path) as other, Claims(store) as ours, Claims(other) as theirs:
        ours.take(CELLS[0])
        change(path, "UPDATE claims SET host = 'far'")
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            assert not theirs.take(CELLS[0])
            time.sleep(0.1)
    assert not ours._heart.is_alive()


def test_a_failure_elsewhere_is_told_and_not_tried_again(store, path, monkeypatch):
    monkeypatch.setattr(run_module, "PAUSE", 0.01)
    told = []
    with Store(path) as other, Claims(other) as theirs:
        theirs.take(CELLS[0])

        def waiting(cells: int) -> None:
            told.append(cells)
            other.fail(CELLS[0], "it hurts")

        def launch(cells: Sequence[Cell], claim: Claim) -> Iterator[Outcome]:
            for cell in cells:
                assert cell.key != CELLS[0].key
                assert claim(cell)
                yield Outcome(cell, make_result(cell.seed), None)

        summary = run_cells(CELLS[:2], store, launch, waiting=waiting)
    assert told == [1]
    assert (summary.done, summary.elsewhere) == (1, 0)
    assert summary.failed == [(CELLS[0], "it hurts")]


def test_a_result_that_comes_meanwhile_is_not_measured(store, path, monkeypatch):
    monkeypatch.setattr(run_module, "PAUSE", 0.01)

    def launch(cells: Sequence[Cell], claim: Claim) -> Iterator[Outcome]:
        with Store(path) as other:
            other.put(make_result(CELLS[1].seed))
        taken = [cell for cell in cells if claim(cell)]
        assert taken == [CELLS[0]]
        yield Outcome(CELLS[0], replace(make_result(CELLS[0].seed), trace=None), None)

    summary = run_cells(CELLS[:2], store, launch)
    assert (summary.done, summary.elsewhere, summary.failed) == (1, 1, [])


def test_a_launcher_that_leaves_cells_out_is_not_asked_again(store):
    calls = []

    def launch(cells: Sequence[Cell], claim: Claim) -> Iterator[Outcome]:
        calls.append(cells)
        assert claim(cells[0])
        return iter(())

    assert run_cells(CELLS[:2], store, launch) == run_module.Summary()
    assert len(calls) == 1
