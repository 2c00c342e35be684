"""``twoshift bench``: measure a table. The same command continues an interrupted run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twoshift.cli._options import (
    Checkpoints,
    Data,
    Models,
    Profile,
    SkipBad,
    StoreFile,
    one_of,
    when_stopped,
)
from twoshift.errors import SettingError

if TYPE_CHECKING:
    from twoshift.bench.cell import Cell
    from twoshift.bench.launch import Launcher, Outcome
    from twoshift.bench.result import Result
    from twoshift.bench.store import Store
    from twoshift.bench.table import Table
    from twoshift.bench.track import Tracker
    from twoshift.bench.workshop import Workshop

EXAMPLE = (
    "Example: twoshift bench table1-cifar10 --profile cpu --only corruption=gaussian_noise,contrast"
)


def _slurm(name: str, text: str, **limits: Any) -> Any:
    """An option of SLURM jobs, named as in dask-jobqueue."""
    return typer.Option(name, help=text, rich_help_panel="With --launch slurm", **limits)


@when_stopped("The same command continues: results so far are stored.")
def bench_command(
    table: Annotated[
        str | None, typer.Argument(help="Name of a table, or a YAML file; without it, a list")
    ] = None,
    store: StoreFile = Path("results.db"),
    profile: Profile = "cpu",
    only: Annotated[
        list[str] | None, typer.Option(help="Only some cells: method=tent,iabn; may be repeated")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of repetitions")] = None,
    launch: Annotated[str, typer.Option(help="local, processes, dask, slurm")] = "local",
    workers: Annotated[int | None, typer.Option(min=1)] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Your own dask cluster: tcp://HOST:PORT")
    ] = None,
    queue: Annotated[str | None, _slurm("--queue", "Partition")] = None,
    account: Annotated[str | None, _slurm("--account", "Who pays")] = None,
    cores: Annotated[int | None, _slurm("--cores", "Per job; each runs a cell", min=1)] = None,
    memory: Annotated[str | None, _slurm("--memory", "Per job: 8GB")] = None,
    walltime: Annotated[str | None, _slurm("--walltime", "Per job: HH:MM:SS")] = None,
    interface: Annotated[str | None, _slurm("--interface", "Network to the jobs: ib0")] = None,
    models: Models = Path("runs"),
    checkpoints: Checkpoints = None,
    data: Data = None,
    skip_bad: SkipBad = False,
    status: Annotated[bool, typer.Option("--status", help="Show progress; run nothing")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells; run nothing")] = False,
    track: Annotated[str | None, typer.Option(help="Also log to mlflow or tensorboard")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON: one object per line")] = False,
) -> None:
    """Measure what is missing of a table, and show the table beside the paper's numbers."""
    from twoshift.bench.table import load_table, table_names

    if table is None:
        for name in table_names():
            typer.echo(f"{name:28s} {load_table(name).title}")
        return
    chosen = load_table(table)
    if chosen.kind == "counts":
        _show(chosen, [], as_json)
        return
    cells = chosen.cells(profile, seeds, _filters(only))
    from twoshift.bench.launch import launcher
    from twoshift.bench.store import Store
    from twoshift.bench.track import trackers
    from twoshift.bench.workshop import Workshop

    if track is not None:
        one_of("tracker", track, trackers)  # before a store is created
    workshop = Workshop(models, data, checkpoints or (), skip_bad)
    options = {"workers": workers, "scheduler": scheduler, "queue": queue, "account": account}
    options |= {"cores": cores, "memory": memory, "walltime": walltime, "interface": interface}
    start = launcher(launch, {k: v for k, v in options.items() if v is not None})
    if dry_run:
        _dry_run(cells, store, workshop, as_json)
        return
    with Store(store, create=not status) as opened:
        if status:
            _status(chosen, cells, opened, as_json)
            return
        failed = measure_missing(cells, opened, partial(start, workshop), track, as_json)
        wanted = {cell.key for cell in cells}
        _show(chosen, [r for r in opened.results() if r.key in wanted], as_json)
    if failed:
        raise typer.Exit(1)


def _filters(only: list[str] | None) -> dict[str, list[str]]:
    filters: dict[str, list[str]] = {}
    for pair in only or []:
        name, equals, values = pair.partition("=")
        if not equals or not values:
            raise SettingError("--only", must_be="NAME=VALUE, or NAME=VALUE,VALUE", got=pair)
        filters.setdefault(name, []).extend(values.split(","))
    return filters


def _readable(cell: Cell) -> str:
    adapter = "" if cell.adapter is None else f" + {cell.adapter} adapter ({cell.estimator})"
    arrival = f" {cell.arrival}" if cell.arrival else ""
    stream = f"{cell.corruption}-{cell.severity} {cell.labels}{arrival} seed {cell.seed}"
    return f"{cell.key[:8]}  {cell.method}{adapter}  {stream}"


def _dry_run(cells: Sequence[Cell], store: Path, workshop: Workshop, as_json: bool) -> None:
    """List the cells; for people, also how many there are and how long they may take."""
    from twoshift.bench.store import Store

    measured, timed = set[str](), dict[tuple[str, str | None], float]()
    if store.exists():
        with Store(store, create=False) as opened:
            measured, timed = opened.keys(), opened.seconds()
    by_key = {cell.key: cell for cell in cells}
    for key, cell in by_key.items():
        content = {"key": key, "cell": asdict(cell), "measured": key in measured}
        typer.echo(json.dumps(content) if as_json else _readable(cell))
    if as_json:
        return
    left = [cell for key, cell in by_key.items() if key not in measured]
    here = f"measured already, in {store}" if store.exists() else f"measured: no {store} yet"
    typer.echo(f"\n{len(by_key):,} cells")
    typer.echo(f"{len(by_key) - len(left):,} {here}")
    typer.echo(f"{len(left):,} to measure")
    if left:
        typer.echo("\n".join(_expected(left, timed, workshop)))


def _expected(
    cells: Sequence[Cell], timed: dict[tuple[str, str | None], float], workshop: Workshop
) -> list[str]:
    """How long cells may take, and what that is based on."""
    from twoshift.bench.cell import TRAINED
    from twoshift.bench.cost import estimate

    expected = estimate(cells, timed)
    lines = [f"estimate: {_duration(expected.seconds)}, one cell at a time"]
    if expected.known:
        lines.append(f"  {expected.known:,} cells as long as others of their method took")
    if expected.counted:
        lines.append(f"  {expected.counted:,} cells by their multiply-adds, at the speed of a")
        lines.append("  forward pass on this CPU just now: expect it to be wrong by a factor of 3")
    if expected.left_out:
        lines.append(f"  without {expected.left_out:,} cells of networks from other libraries")
    sources = {c.model.source_key: c.model for c in cells if c.model}
    adapters = {c.model.adapter_key: c.model for c in cells if c.model and c.adapter == TRAINED}
    to_train = [
        f"{count} {kind}"
        for kind, models in (("source models", sources), ("adapters", adapters))
        if (count := sum(workshop.missing(m, kind == "adapters") for m in models.values()))
    ]
    if to_train:
        lines.append(f"  not estimated: the training of {' and '.join(to_train)}")
    return lines


def _duration(seconds: float) -> str:
    if seconds < 10:
        return "a few seconds"
    if seconds < 90:
        return f"about {seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"about {seconds / 60:.0f} minutes"
    if seconds < 48 * 3600:
        return f"about {seconds / 3600:.0f} hours"
    return f"about {seconds / 86400:.0f} days"


def _status(table: Table, cells: Sequence[Cell], store: Store, as_json: bool) -> None:
    from twoshift.bench.run import missing

    left, damaged = missing(cells, store), store.damaged()
    wanted = {cell.key for cell in cells}
    failed = [f for f in store.failures() if f.key in wanted]
    facts = {
        "table": table.name,
        "cells": len(wanted),
        "done": len(wanted) - len(left),
        "missing": len(left),
        "failed": len(failed),
        "damaged": len(wanted & set(damaged)),
    }
    if as_json:
        typer.echo(json.dumps(facts))
        return
    typer.echo(", ".join(f"{name} {value}" for name, value in facts.items()))
    for failure in failed:
        typer.echo(f"  {failure.key[:8]}  {failure.error.strip().splitlines()[-1]}")


def measure_missing(
    cells: Sequence[Cell],
    store: Store,
    start: Launcher,
    track: str | None = None,
    as_json: bool = False,
) -> bool:
    """Measure the cells that a store lacks, with a progress bar; whether some of them failed.

    Args:
        cells: What is wanted.
        store: Where results go.
        start: A launcher with its workshop.
        track: Name of an experiment tracker.
        as_json: One JSON object per finished cell instead of the bar.
    """
    from twoshift.bench.run import missing, run_cells
    from twoshift.bench.track import tracker

    left = missing(cells, store)
    if not left:
        return False
    report = _Report(left, store, as_json)
    tracking: AbstractContextManager[Tracker | None] = nullcontext()
    if track is not None:
        tracking = closing(tracker(track, store.path.stem, store.path.parent))
    with report.progress, tracking as log:

        def finished(outcome: Outcome) -> None:
            report.finished(outcome)
            if log and outcome.error is None and outcome.result is not None:
                log.log(outcome.result)

        launch = partial(start, progress=report.batch)
        summary = run_cells(left, store, launch, finished, report.waiting)
    for cell, error in summary.failed:
        typer.echo(f"failed: {_readable(cell)}\n{error}", err=True)
    return bool(summary.failed)


class _Report:
    """One bar over all cells, in seconds of expected work, with what runs and how well.

    With ``as_json``, one JSON object per finished cell instead.
    """

    def __init__(self, cells: Sequence[Cell], store: Store, as_json: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        seconds, console = store.seconds(), Console(stderr=True)
        usual = sum(seconds.values()) / len(seconds) if seconds else 1.0
        self._weights = {c.key: seconds.get((c.method, c.adapter), usual) for c in cells}
        self._done, self._cells, self._right = 0, len(cells), list[float]()
        self._as_json = as_json
        self.progress = Progress(
            TextColumn("{task.fields[count]}"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=as_json or not console.is_terminal,  # quiet where nobody watches
        )
        total = sum(self._weights.values())
        self._task = self.progress.add_task("", total=total, count=f"0/{len(cells)}")

    def batch(self, cell: Cell, done: int, total: int) -> None:
        """Show which cell is running."""
        self.progress.update(
            self._task, description=f"{cell.method} {cell.corruption} {cell.labels} {done}/{total}"
        )

    def waiting(self, cells: int) -> None:
        """Show that the cells that are left are measured by others."""
        self.progress.update(self._task, description=f"waiting for {cells} cells of another bench")

    def finished(self, outcome: Outcome) -> None:
        """Count a cell that has ended, and show how well the cells do."""
        accuracy = None if outcome.result is None else outcome.result.accuracy
        if self._as_json:
            line = {"key": outcome.cell.key, "accuracy": accuracy, "error": outcome.error}
            typer.echo(json.dumps(line))
        self._done += 1
        if accuracy is not None:
            self._right.append(accuracy)
        mean = f", accuracy {100 * sum(self._right) / len(self._right):.1f}" if self._right else ""
        self.progress.update(
            self._task,
            advance=self._weights[outcome.cell.key],
            count=f"{self._done}/{self._cells}",
            description=f"{outcome.cell.method} {outcome.cell.labels}{mean}",
        )


def _show(table: Table, results: list[Result], as_json: bool) -> None:
    """Print the table beside the paper's; with JSON, the lines are enough."""
    if as_json:
        return
    from rich.console import Console

    from twoshift.report.terminal import rich_comparison

    for part in rich_comparison(table, results):
        Console().print(part)
