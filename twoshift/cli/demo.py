"""``twoshift demo``: the whole method on real digits, with a table and two plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twoshift.cli.train import progress_bar

if TYPE_CHECKING:
    from twoshift.bench.result import Result
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


def demo_command(
    out: Annotated[Path, typer.Option("--out", help="Folder for models, table and plots")] = Path(
        "demo"
    ),
    seeds: Annotated[int, typer.Option("--seeds", min=2, help="Repetitions")] = 3,
) -> None:
    """Train, adapt and measure on real MNIST digits; about four minutes on two cores."""
    import json
    from dataclasses import replace

    from rich.console import Console

    from twoshift.bench.demo import CORRUPTIONS, SEVERITY, run_demo
    from twoshift.report import draw, tables
    from twoshift.storage import atomic_file
    from twoshift.train.checkpoint import load_source

    with progress_bar("train, adapt, measure") as progress:
        results = run_demo(out, seeds, progress=progress)
    with atomic_file(out / "results.jsonl") as temporary:
        slim = (replace(r, trace=None).to_json() for r in results)
        temporary.write_text("".join(json.dumps(r) + "\n" for r in slim))
    table = main_table(results)
    changes = tables.differences(table, PAIRS)
    console = Console(width=None if Console().is_terminal else 130)
    console.print(
        tables.rich_table(
            table,
            f"Accuracy, %: long-tailed MNIST, {', '.join(CORRUPTIONS)} at severity {SEVERITY}; "
            f"mean of {seeds} seeds [95 % interval]",
        )
    )
    console.print()
    console.print(
        tables.rich_differences(changes, "Paired differences on identical streams, points")
    )
    console.print()
    for line in verdicts(changes):
        console.print(line, highlight=False)
    with atomic_file(out / "table.md") as temporary:
        temporary.write_text(as_markdown(results))
    counts = load_source(out / "source-bn-0").card.class_counts
    draw.save(accuracy_figure(results), out / "accuracy_against_shift.png")
    traces: dict[str, dict[str, Any]] = {labels: {} for labels in MAIN}
    for r in results:
        cell, name = r.cell, tables.row_name(r)
        first = cell.seed == 0 and cell.corruption == CORRUPTIONS[0]
        if first and name in TRACED and cell.labels in MAIN:
            traces[cell.labels][name] = r.trace
    title = f"Label estimate, {CORRUPTIONS[0]}, one seed"
    draw.save(draw.estimates(traces, counts, title), out / "label_estimate.png")
    names = "accuracy_against_shift.png, label_estimate.png, table.md, results.jsonl"
    console.print(f"\nIn {out}: {names}", highlight=False)


MAIN = ("forward-50", "uniform", "backward-50")
TRACED = ("TENT", "TENT + adapter", "IABN", "IABN + adapter")


def main_table(results: list[Result]) -> Grid:
    """The table that is shown: the main label distributions and their mean."""
    from twoshift.report import tables

    full = tables.grid(results)
    main = {name: {c: cells[c] for c in MAIN if c in cells} for name, cells in full.items()}
    return tables.with_mean(main)


def as_markdown(results: list[Result]) -> str:
    """The table and the differences between its rows."""
    from twoshift.report import tables

    table = main_table(results)
    changes = tables.markdown_differences(tables.differences(table, PAIRS))
    return tables.markdown(table) + "\n" + changes


def accuracy_figure(results: list[Result]) -> Any:
    """Accuracy against the degree of label shift."""
    from twoshift.bench.demo import CORRUPTIONS
    from twoshift.report import draw, tables

    panels = {f"mean of {', '.join(CORRUPTIONS)}": tables.grid(results)}
    return draw.accuracy(panels, "Accuracy under both shifts (MNIST, corrupted)")


def verdicts(changes: dict[str, dict[str, Difference]]) -> list[str]:
    """What the intervals allow to say, one line per comparison."""
    from twoshift.report.tables import shift_name, verdict

    lines = []
    for name, cells in changes.items():
        said = [f"{c if c == 'mean' else shift_name(c)}: {verdict(d)}" for c, d in cells.items()]
        lines.append(f"{name}: {', '.join(said)}")
    return lines
