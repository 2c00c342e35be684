"""A table for the terminal, with the paper's numbers in a row below each of ours."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table as RichTable

from twoshift.bench.result import Result
from twoshift.bench.table import MEAN, Table
from twoshift.report.columns import heading
from twoshift.report.compare import Comparison, Number, compare
from twoshift.report.numbers import decimal, with_interval
from twoshift.report.tables import empty_table


def rich_comparison(table: Table, results: Iterable[Result]) -> list[RenderableType]:
    """The table, notes on how it compares with the paper, and alarms."""
    if table.kind == "counts":
        return [_counts(table)]
    comparisons = [c for c in compare([table], results) if c.title == table.title]
    if not comparisons:
        return [f"{table.title}: nothing measured yet."]
    (comparison,) = comparisons
    notes = [f"[yellow]Not comparable: {escape(note)}[/]" for note in comparison.notes]
    alarms = [
        f"[red]{escape(a.row)}, {heading(a.column)}: {escape(a.what)} "
        f"({a.streams} of {a.of} streams)[/]"
        for a in comparison.alarms
    ]
    return [_measured(table, comparison), *notes, *alarms]


def _measured(table: Table, comparison: Comparison) -> RichTable:
    columns = [*comparison.columns, MEAN]
    reference = f" ({table.reference})" if table.reference else ""
    title = f"{table.title}{reference}; accuracy in %"
    shown = empty_table(title, [*map(heading, columns), "worst"])
    for row in comparison.rows:
        numbers = [_ours(row.numbers.get(c)) for c in columns]
        worst = f"{decimal(row.numbers[row.worst].ours)} {heading(row.worst)}"
        shown.add_row(escape(row.name), *numbers, worst, style="dim" if row.oracle else "")
        if any(printed := row.printed(columns)):
            shown.add_row("  in the paper", *printed, "", style="dim italic")
    return shown


def _ours(number: Number | None) -> str:
    if number is None:
        return "-"
    star = "*" if number.missing else ""  # of fewer streams than other rows have
    text = escape(with_interval(number.ours, number.interval) + star)
    return f"[bold]{text}[/]" if number.best else text


def _counts(table: Table) -> RichTable:
    title = f"{table.title} ({table.reference}); counted, in millions"
    shown = empty_table(title, table.columns)
    counts, paper = table.counts(), table.paper
    for row in table.rows:
        shown.add_row(escape(row), *(_millions(counts[row, c]) for c in table.columns))
        printed = [_millions(paper.get((row, c))) for c in table.columns]
        shown.add_row("  in the paper", *printed, style="dim italic")
    return shown


def _millions(count: float | None) -> str:
    return decimal(None if count is None else count / 1e6, 2)
