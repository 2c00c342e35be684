"""Overhead of the benchmark runner: ``python -m benchmarks.runner_speed [--out FILE]``.

Costs are CPU time, so that other work on the machine does not change them; time spent waiting for
the disk is not included. Whether workers run in parallel can only be seen in elapsed time, which is
measured on a quiet machine only.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import typer

from benchmarks.speed import WIDTH
from benchmarks.speed_report import Out, finish
from benchmarks.timing import Candidate, Check, resident, take_turns, timed
from twoshift.bench.cell import Cell, Model
from twoshift.bench.launch import Outcome, launcher
from twoshift.bench.measure import prepare
from twoshift.bench.result import Result
from twoshift.bench.run import run_cells
from twoshift.bench.store import Store, import_lines
from twoshift.bench.table import load_table
from twoshift.bench.workshop import Workshop
from twoshift.cli.bench import bench_command
from twoshift.cli.report import report_command
from twoshift.train.recipes import AdapterRecipe, SourceRecipe, load_recipe

IMAGES, TINY = "mnist5k", "digits8x8"  # cells that take seconds, and milliseconds
ROUNDS = 16  # of the bare loop
FEW, MANY = 2, 10  # cells for the launchers
TABLE, FINISHED, REPORTED = "table1-cifar10", 5_000, 20_000
QUIET = 0.5  # load below which elapsed times can be trusted
ELAPSED = "local / 2 processes, elapsed"


def make_cells(count: int, dataset: str = "", batch_size: int = 64) -> list[Cell]:
    """Cells on digits, which come with a Python package, and the network of `benchmarks.speed`."""
    changes = {"dataset": dataset or IMAGES, "epochs": 1, "settings": {"width": WIDTH}}
    source = load_recipe(SourceRecipe, "demo", **changes)
    model = Model(source.model_dump(), load_recipe(AdapterRecipe, "demo").model_dump())
    return [Cell("tent", seed=seed, batch_size=batch_size, model=model) for seed in range(count)]


def overhead(workshop: Workshop, folder: Path) -> list[Check]:
    """Compare the runner and its store with a plain loop over batches."""
    (cell,), names = make_cells(1), itertools.count()

    def bare() -> None:
        assert cell.model is not None
        method, stream = prepare(cell, workshop.source(cell.model), None, workshop.images)
        sum(int((method(batch.x).argmax(1) == batch.y).sum()) for batch in stream)

    def runner() -> None:
        with Store(folder / f"overhead-{next(names)}.db") as store:
            summary = run_cells([cell], store, partial(launcher("local"), workshop))
        assert not summary.failed, summary.failed  # a failed cell ends too soon

    candidates = {"bare": Candidate(bare), "runner": Candidate(runner)}
    times = take_turns(candidates, ROUNDS, time.process_time)
    return [timed("runner / bare loop", times, "runner", "bare", high=1.03)]


def successes(outcomes: Iterable[Outcome]) -> Iterator[None]:
    """Yield once per outcome; refuse failed cells, which end too soon."""
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        yield


class Seconds(NamedTuple):
    """Time used by this process and by its child processes that have ended."""

    cpu: float
    elapsed: float


def time_all(outcomes: Iterable[Outcome]) -> Seconds:
    """The time until all outcomes have come."""
    before = os.times()
    for _ in successes(outcomes):
        pass
    after = os.times()
    return Seconds(sum(after[:4]) - sum(before[:4]), after.elapsed - before.elapsed)


def parallel(workshop: Workshop, quiet: bool) -> list[Check]:
    """Compare two workers of one thread each with one thread here, start-up excluded."""
    few, many = make_cells(FEW), make_cells(MANY)

    def extra(name: str, **options: Any) -> Seconds:
        """What many cells cost more than few."""
        run = partial(launcher(name, options), workshop)
        start, total = time_all(run(few)), time_all(run(many))
        return Seconds(total.cpu - start.cpu, total.elapsed - start.elapsed)

    local, two = extra("local"), extra("processes", workers=2)
    checks = [Check("2 processes / local, CPU time", two.cpu / local.cpu)]
    return checks + ([Check(ELAPSED, local.elapsed / two.elapsed, low=1.6)] if quiet else [])


def dask(workshop: Workshop) -> list[Check]:
    """The overhead per cell of a cluster with one worker, once it is warm."""
    cells = make_cells(5 * MANY, TINY)

    def between(outcomes: Iterable[Outcome]) -> float:
        """Milliseconds from one outcome to the next."""
        marks = [time.perf_counter() for _ in successes(outcomes)]
        return 1e3 * median(b - a for a, b in itertools.pairwise(marks))

    local = between(launcher("local")(workshop, cells))
    cluster = between(launcher("dask", {"workers": 1})(workshop, cells))
    return [Check("dask, overhead per cell", max(0.0, cluster - local), high=50, unit="ms")]


def fill(path: Path, cells: Sequence[Cell], sample: Result) -> None:
    """Write a store with a result for every cell, all copies of a measured one."""
    lines = path.with_suffix(".jsonl")
    with lines.open("w") as file:
        for i, cell in enumerate(cells):
            model = cell.model
            assert model is not None
            result = replace(
                sample,
                key=cell.key,
                cell=cell,
                source=replace(sample.source, seed=model.seed, weights=model.source_key),
                adapter=model.adapter_key if cell.adapter == "trained" else None,
                metrics={**sample.metrics, "accuracy": 0.3 + 0.4 * (i % 97) / 97},
            )
            file.write(json.dumps(result.to_json()) + "\n")
    with Store(path) as store:
        import_lines(store, lines)


def large(workshop: Workshop, folder: Path) -> list[Check]:
    """Time whole commands: resuming a finished table, and reporting very many cells."""
    (cell,) = make_cells(1, batch_size=32)
    sample, table = workshop.run(cell), load_table(TABLE)
    seeds = -(-FINISHED // len(table.cells("cpu", 1)))
    finished, page = table.cells("cpu", seeds), folder / "page.html"
    fill(folder / "finished.db", finished, sample)
    start = time.process_time()
    with redirect_stdout(StringIO()):
        bench_command(TABLE, store=folder / "finished.db", seeds=seeds)
    resume = time.process_time() - start
    reported = table.cells("cpu", -(-REPORTED // len(table.cells("cpu", 1))))[:REPORTED]
    fill(folder / "reported.db", reported, sample)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        seconds, peak = pool.submit(report, folder / "reported.db", page).result()
    name = f"page of {len(reported):,} cells"
    checks = [
        Check(f"resume of {len(finished):,} finished cells", resume, high=3, unit="s"),
        Check(name, seconds, high=20, unit="s"),
        Check(f"{name}, size", page.stat().st_size / 1e6, high=15, unit="MB"),
    ]
    return checks + ([] if peak is None else [Check(f"{name}, peak", peak, high=2000, unit="MB")])


def report(store: Path, page: Path) -> tuple[float, float | None]:
    """CPU seconds and peak memory of the report; call this in a fresh process."""
    start = time.process_time()
    with redirect_stdout(StringIO()):
        report_command(store, [page])
    seconds = time.process_time() - start
    return seconds, resident("VmHWM") if sys.platform == "linux" else None


def main(out: Out = Path("results/runner-speed.json")) -> None:
    """Measure, print and write; the exit code is 1 if a limit is broken."""
    torch.set_num_threads(1)
    load, has_dask = os.getloadavg()[0], find_spec("distributed") is not None
    quiet = load < QUIET
    with TemporaryDirectory() as name:
        folder = Path(name)
        workshop = Workshop(folder / "models", folder / "data")
        checks = [*overhead(workshop, folder), *parallel(workshop, quiet), *large(workshop, folder)]
        checks += dask(workshop) if has_dask else []
    settings = {"load_before": load, "cores": os.cpu_count(), "dask": has_dask}
    notes = []
    if not quiet:
        notes.append(f"{ELAPSED}: not measured because the machine is busy (load {load:.1f})")
    if not has_dask:
        cure = "pip install 'twoshift[dask]'"
        notes.append(f"dask: not measured because it is not installed: {cure}")
    finish(out, checks, *notes, settings=settings, not_measured=[] if quiet else [ELAPSED])


if __name__ == "__main__":
    typer.run(main)
