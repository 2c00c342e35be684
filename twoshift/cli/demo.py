"""``twoshift demo``: the whole method on real digits, with a table and two plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twoshift.cli._options import when_stopped
from twoshift.cli.bench import measure_missing

if TYPE_CHECKING:
    from twoshift.bench import Result
    from twoshift.metrics import Difference
    from twoshift.report.tables import Grid

EXAMPLE = "Example: twoshift demo --out demo --seeds 3"
PAIRS = (
    ("TENT", "Source"),
    ("TENT + adapter", "TENT"),
    ("TENT + adapter, oracle prior", "TENT"),
    ("IABN + adapter", "IABN"),
    ("IABN + adapter, oracle prior", "IABN"),
)
MAIN = ("forward-50", "uniform", "backward-50")
TRACED = ("TENT", "TENT + adapter", "IABN", "IABN + adapter")


@when_stopped("The same command continues: models and results so far are kept.")
def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for models, table and plots")] = Path("demo"),
    seeds: Annotated[int, typer.Option(min=2, help="Repetitions")] = 3,
) -> None:
    """Train, adapt and measure on real MNIST digits; about four minutes on two cores."""
    from functools import partial

    from rich.console import Console

    from twoshift.bench.launch import launcher
    from twoshift.bench.store import Store, export_lines
    from twoshift.bench.table import load_table
    from twoshift.bench.workshop import Workshop
    from twoshift.report import draw, tables
    from twoshift.storage import atomic_file

    cells = load_table("demo").cells("cpu", seeds)
    workshop = Workshop(out / "models", out)
    with Store(out / "results.db") as store:
        if measure_missing(cells, store, partial(launcher("processes"), workshop)):
            raise typer.Exit(1)
        by_key = {result.key: result for result in store.results(trace=True)}
        export_lines(store, out / "results.jsonl")
    results = [by_key[cell.key] for cell in cells]
    table = main_table(results)
    changes = tables.differences(table, PAIRS)
    console = Console(width=None if Console().is_terminal else 130)
    title = (
        f"Accuracy, %: long-tailed MNIST, {_corruptions(results)} at severity {cells[0].severity}; "
        f"mean of {seeds} seeds [95 % interval]"
    )
    console.print(tables.rich_table(table, title), "")
    title = "Paired differences on identical streams, points"
    console.print(tables.rich_differences(changes, title), "")
    for line in verdicts(changes):
        console.print(line, highlight=False)
    with atomic_file(out / "table.md") as temporary:
        temporary.write_text(as_markdown(results))
    draw.save(accuracy_figure(results), out / "accuracy_against_shift.png")
    assert cells[0].model is not None
    counts = workshop.source(cells[0].model).card.class_counts
    draw.save(estimate_figure(results, counts), out / "label_estimate.png")
    names = "accuracy_against_shift.png, label_estimate.png, table.md, results.jsonl"
    console.print(f"\nIn {out}: {names}", highlight=False)


def _corruptions(results: Sequence[Result]) -> str:
    return ", ".join(dict.fromkeys(result.cell.corruption for result in results))


def main_table(results: Sequence[Result]) -> Grid:
    """The table that is shown: the main label distributions and their mean."""
    from twoshift.report import tables

    full = tables.grid(results)
    main = {name: {c: cells[c] for c in MAIN if c in cells} for name, cells in full.items()}
    return tables.with_mean(main)


def as_markdown(results: Sequence[Result]) -> str:
    """The table and the differences between its rows."""
    from twoshift.report import tables

    table = main_table(results)
    changes = tables.markdown_differences(tables.differences(table, PAIRS))
    return tables.markdown(table) + "\n" + changes


def accuracy_figure(results: Sequence[Result]) -> Any:
    """Accuracy against the degree of label shift."""
    from twoshift.report import draw, tables

    panels = {f"mean of {_corruptions(results)}": tables.grid(results)}
    return draw.accuracy(panels, "Accuracy under both shifts (MNIST, corrupted)")


def estimate_figure(results: Sequence[Result], class_counts: Sequence[int]) -> Any:
    """Estimated against true labels, on the streams of one corruption and seed."""
    from twoshift.report import draw, tables

    corruption = results[0].cell.corruption
    traces: dict[str, dict[str, Any]] = {labels: {} for labels in MAIN}
    for result in results:
        cell, name = result.cell, tables.row_name(result)
        first = (cell.seed, cell.corruption) == (0, corruption)
        if first and name in TRACED and cell.labels in MAIN:
            traces[cell.labels][name] = result.trace
    return draw.estimates(traces, class_counts, f"Label estimate, {corruption}, one seed")


def verdicts(changes: dict[str, dict[str, Difference]]) -> list[str]:
    """What the intervals show, one line per comparison."""
    from twoshift.report.columns import heading
    from twoshift.report.tables import verdict

    return [
        f"{name}: {', '.join(f'{heading(c)}: {verdict(d)}' for c, d in cells.items())}"
        for name, cells in changes.items()
    ]
