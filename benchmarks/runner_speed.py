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
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console

from benchmarks import speed_report
from benchmarks.speed import WIDTH
from benchmarks.timing import Candidate, Check, resident, take_turns, timed
from twoshift.bench.cell import Cell, Model, build, stream_of
from twoshift.bench.launch import Outcome, launcher
from twoshift.bench.run import run_cells
from twoshift.bench.store import Store, import_lines
from twoshift.bench.table import load_table
from twoshift.bench.workshop import Workshop
from twoshift.cli.bench import bench_command
from twoshift.cli.report import report_command
from twoshift.storage import write_json
from twoshift.train.recipes import AdapterRecipe, SourceRecipe, load_recipe

IMAGES, TINY = "mnist5k", "digits8x8"  # cells of seconds, of milliseconds
ROUNDS, FEW, MANY = 16, 2, 10  # of the bare loop; cells of the launchers
TABLE, FINISHED, REPORTED = "table1-cifar10", 5_000, 20_000
QUIET = 0.5  # load of a machine on which a clock can be trusted
ELAPSED = "local / 2 processes, elapsed"


def make_cells(count: int, dataset: str = "", batch_size: int = 64) -> list[Cell]:
    """Streams of digits, which come with a package, through the network of `benchmarks.speed`."""
    changes = {"dataset": dataset or IMAGES, "epochs": 1, "settings": {"width": WIDTH}}
    source = load_recipe(SourceRecipe, "demo", **changes)
    model = Model(source.model_dump(), load_recipe(AdapterRecipe, "demo").model_dump())
    return [Cell("tent", seed=seed, batch_size=batch_size, model=model) for seed in range(count)]


def overhead(workshop: Workshop, folder: Path) -> list[Check]:
    """The runner with its store against what one would write without it."""
    cells, names = make_cells(1), itertools.count()

    def bare() -> None:
        for cell in cells:
            assert cell.model is not None
            source = workshop.source(cell.model)
            stream = stream_of(cell, workshop.images(cell, source), source.card.class_counts)
            method, right = build(cell, source, None, stream), 0
            for batch in stream:
                right += int((method(batch.x).argmax(1) == batch.y).sum())

    def runner() -> None:
        with Store(folder / f"overhead-{next(names)}.db") as store:
            summary = run_cells(cells, store, partial(launcher("local"), workshop))
        assert not summary.failed, summary.failed  # a failed cell would be too quick

    candidates = {"bare": Candidate(bare), "runner": Candidate(runner)}
    times = take_turns(candidates, ROUNDS, time.process_time)
    return [timed("runner / bare loop", times, "runner", "bare", high=1.03)]


def measured(outcomes: Iterable[Outcome]) -> Iterator[None]:
    """One by one; a failed cell would be too quick."""
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        yield


class Spent(NamedTuple):
    """Seconds of this process and of those that it started and that have ended."""

    cpu: float
    elapsed: float


def spent(outcomes: Iterable[Outcome]) -> Spent:
    """What it takes to get all of them."""
    before = os.times()
    for _ in measured(outcomes):
        pass
    after = os.times()
    return Spent(sum(after[:4]) - sum(before[:4]), after.elapsed - before.elapsed)


def parallel(workshop: Workshop, quiet: bool) -> list[Check]:
    """Two workers of one thread each against one thread here, without the start of either."""
    few, many = make_cells(FEW), make_cells(MANY)

    def extra(name: str, **options: Any) -> Spent:
        """What more cells cost."""
        run = partial(launcher(name, options), workshop)
        start, whole = spent(run(few)), spent(run(many))
        return Spent(whole.cpu - start.cpu, whole.elapsed - start.elapsed)

    alone, two = extra("local"), extra("processes", workers=2)
    checks = [Check("2 processes / local, CPU time", two.cpu / alone.cpu)]
    return checks + ([Check(ELAPSED, alone.elapsed / two.elapsed, low=1.6)] if quiet else [])


def dask(workshop: Workshop) -> list[Check]:
    """What a cell costs on a cluster of one worker, beside its work, once both are warm."""
    cells = make_cells(5 * MANY, TINY)

    def between(outcomes: Iterable[Outcome]) -> float:
        """Milliseconds from one outcome to the next."""
        marks = [time.perf_counter() for _ in measured(outcomes)]
        return 1e3 * median(b - a for a, b in itertools.pairwise(marks))

    local = between(launcher("local")(workshop, cells))
    there = between(launcher("dask", {"workers": 1})(workshop, cells))
    beside = max(0.0, there - local)
    return [Check("dask, per cell beside its work", beside, high=50, unit="ms")]


def fill(path: Path, cells: Sequence[Cell], sample: dict[str, Any]) -> None:
    """A store with a result for every cell, all like one that was measured."""
    lines = path.with_suffix(".jsonl")
    with lines.open("w") as file:
        file.writelines(json.dumps(r) + "\n" for r in results_of(cells, sample))
    with Store(path) as store:
        import_lines(store, lines)


def results_of(cells: Sequence[Cell], sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The sample, as if it were the result of each of these cells."""
    for i, cell in enumerate(cells):
        model = cell.model
        assert model is not None
        yield {
            **sample,
            "key": cell.key,
            "cell": asdict(cell),
            "source": {**sample["source"], "seed": model.seed, "weights": model.source_key},
            "adapter": model.adapter_key if cell.adapter == "trained" else None,
            "metrics": {**sample["metrics"], "accuracy": 0.3 + 0.4 * (i % 97) / 97},
        }


def large(workshop: Workshop, folder: Path) -> list[Check]:
    """The whole commands: going on with a finished table, and a page of very many cells."""
    (cell,) = make_cells(1, batch_size=32)
    sample, table = workshop.run(cell), load_table(TABLE)
    seeds = -(-FINISHED // len(table.cells("cpu", 1)))
    finished, pages = table.cells("cpu", seeds), folder / "page.html"
    fill(folder / "finished.db", finished, sample)
    start = time.process_time()
    with redirect_stdout(StringIO()):
        bench_command(TABLE, store=folder / "finished.db", seeds=seeds)
    resume = time.process_time() - start
    reported = table.cells("cpu", -(-REPORTED // len(table.cells("cpu", 1))))[:REPORTED]
    fill(folder / "reported.db", reported, sample)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        seconds, peak = pool.submit(report, folder / "reported.db", pages).result()
    name = f"page of {len(reported):,} cells"
    checks = [
        Check(f"resume of {len(finished):,} finished cells", resume, high=3, unit="s"),
        Check(name, seconds, high=20, unit="s"),
        Check(f"{name}, size", pages.stat().st_size / 1e6, high=15, unit="MB"),
    ]
    return checks + ([] if peak is None else [Check(f"{name}, peak", peak, high=2000, unit="MB")])


def report(store: Path, page: Path) -> tuple[float, float | None]:
    """CPU seconds and peak memory of the report; run this in a fresh process."""
    start = time.process_time()
    with redirect_stdout(StringIO()):
        report_command(store, [page])
    seconds = time.process_time() - start
    return seconds, resident("VmHWM") if sys.platform == "linux" else None


def main(
    out: Annotated[Path, typer.Option("--out", help="JSON file")] = Path(
        "results/runner-speed.json"
    ),
) -> None:
    """Measure, print, write; exit code 1 if a limit is broken."""
    torch.set_num_threads(1)
    load, has_dask = os.getloadavg()[0], find_spec("distributed") is not None
    quiet = load < QUIET
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workshop = Workshop(folder / "models", folder / "data")
        checks = [*overhead(workshop, folder), *parallel(workshop, quiet)]
        checks += large(workshop, folder)
        checks += dask(workshop) if has_dask else []
    settings = {"load_before": load, "cores": os.cpu_count(), "dask": has_dask}
    record = {
        "settings": settings,
        "checks": [{**asdict(c), "ok": c.ok} for c in checks],
        "not_measured": [] if quiet else [ELAPSED],
    }
    console = Console(width=None if Console().is_terminal else 120)
    console.print(speed_report.limits(record))
    if not quiet:
        console.print(f"{ELAPSED}: not measured, the machine is busy (load {load:.1f})")
    if not has_dask:
        cure = "pip install 'twoshift[dask]'"
        console.print(f"dask is not installed, so not measured: {cure}", markup=False)
    write_json(out, record)
    if not all(c.ok for c in checks):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
