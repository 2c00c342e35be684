"""Tables of results: means over seeds with intervals, for a terminal and as Markdown."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.markup import escape
from rich.table import Table

from twoshift import methods
from twoshift.bench.cell import TRAINED
from twoshift.bench.result import Result
from twoshift.bench.table import MEAN
from twoshift.errors import InputError
from twoshift.metrics import Difference, mean_interval, paired_difference
from twoshift.report.columns import degree, shift_name
from twoshift.report.markdown import plain
from twoshift.report.numbers import with_interval


def row_name(result: Result) -> str:
    """The name of a method in a table, for example ``TENT + adapter, oracle prior``."""
    cell = result.cell
    known = cell.method in methods.methods  # a result may come from a user's own method
    name = methods.methods[cell.method].title if known else cell.method
    if cell.adapter == TRAINED:
        name += " + adapter"
    elif cell.adapter is not None:
        name += f" + {cell.adapter} adapter"
    if not cell.uses_estimator:
        return name
    estimators = {"ema": "", "oracle": ", oracle prior"}
    return name + estimators.get(cell.estimator, f", {cell.estimator}")


@dataclass(frozen=True)
class Entry:
    """One number of a table: a mean over seeds, with the values behind it.

    Attributes:
        values: One value per seed, each the mean over the corruptions.
        seeds: The seeds of training and stream, in the same order.
    """

    values: tuple[float, ...]
    seeds: tuple[tuple[int, int], ...] = ()

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return float(np.mean(self.values))

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean; None for a single seed."""
        return mean_interval(self.values) if len(self.values) > 1 else None

    def show(self, scale: float = 100, digits: int = 1) -> str:
        """The mean and its interval; by default in percent."""
        interval = self.interval and (scale * self.interval[0], scale * self.interval[1])
        return with_interval(scale * self.mean, interval, digits)

    __str__ = show


Grid = dict[str, dict[str, Entry]]


def labels_of(result: Result) -> str:
    """The label distribution of a result."""
    return result.cell.labels


def grid(
    results: Iterable[Result],
    metric: str = "accuracy",
    row: Callable[[Result], str] = row_name,
    column: Callable[[Result], str] = labels_of,
) -> Grid:
    """Rows by method, columns by label shift; corruptions are averaged for every seed."""
    values: dict[tuple[str, str], dict[tuple[int, int], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for result in results:
        value = result.metrics[metric]
        if value is None:
            raise InputError(f"metric {metric!r} of {row(result)}", must_be="a number", got="none")
        pair = (result.source.seed, result.cell.seed)
        values[row(result), column(result)][pair].append(value)
    # others than label shifts stay in the order of the results
    columns = sorted(dict.fromkeys(name for _, name in values), key=lambda name: degree(name)[0])
    table: Grid = {}
    for (name, labels), by_seed in values.items():
        seeds = tuple(sorted(by_seed))
        entry = Entry(tuple(float(np.mean(by_seed[s])) for s in seeds), seeds)
        table.setdefault(name, {})[labels] = entry
    return {name: {c: cells[c] for c in columns if c in cells} for name, cells in table.items()}


def with_mean(table: Grid) -> Grid:
    """The table with a column ``mean`` over its columns."""
    return {name: {**cells, MEAN: mean_of([*cells.values()])} for name, cells in table.items()}


def mean_of(entries: Sequence[Entry]) -> Entry:
    """The mean of entries, seed by seed; where their seeds differ, the mean of their means."""
    if len({(entry.seeds, len(entry.values)) for entry in entries}) > 1:
        return Entry((float(np.mean([entry.mean for entry in entries])),))
    per_seed = zip(*(entry.values for entry in entries), strict=True)
    return Entry(tuple(float(np.mean(values)) for values in per_seed), entries[0].seeds)


def differences(table: Grid, pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, Difference]]:
    """Paired differences on identical streams: for (a, b), a minus b in every column."""
    return {
        f"{a} against {b}": {
            column: _difference(table[a][column], table[b][column]) for column in table[a]
        }
        for a, b in pairs
        if a in table and b in table
    }


def _difference(a: Entry, b: Entry) -> Difference:
    if a.seeds != b.seeds:
        raise InputError("rows to compare", must_be=f"of the same seeds {a.seeds}", got=b.seeds)
    if len(a.values) > 1:
        return paired_difference(a.values, b.values)
    return Difference(a.mean - b.mean, float("nan"), float("nan"))  # one seed has no interval


def verdict(difference: Difference) -> str:
    """The conclusion that an interval allows."""
    if difference.low > 0:
        return "better"
    return "worse" if difference.high < 0 else "no clear difference"


def _heading(column: str) -> str:
    return column if column == MEAN else shift_name(column)


def empty_table(title: str, headings: Iterable[str]) -> Table:
    """A table for a terminal, without rows: a column for their names, then right-aligned ones."""
    table = Table("", title=title, title_justify="left", header_style="bold", box=None)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def rich_table(table: Grid, title: str) -> Table:
    """For a terminal; the best mean of a column is bold, oracles aside."""
    columns = list(next(iter(table.values())))
    shown = empty_table(title, map(_heading, columns))
    best = {
        c: max((name for name in table if "oracle" not in name), key=lambda n: table[n][c].mean)
        for c in columns
    }
    for name, cells in table.items():
        entries = [f"[bold]{cells[c]}[/]" if best[c] == name else str(cells[c]) for c in columns]
        title = f"[dim]{escape(name)}[/]" if "oracle" in name else escape(name)
        shown.add_row(title, *map(_escape, entries))
    return shown


def _escape(text: str) -> str:
    return text.replace(" [", r" \[")


def rich_differences(rows: dict[str, dict[str, Difference]], title: str) -> Table:
    """For a terminal: points of accuracy, green where better and red where worse."""
    shown = empty_table(title, map(_heading, next(iter(rows.values()))))
    colours = {"better": "green", "worse": "red", "no clear difference": "yellow"}
    for name, cells in rows.items():
        points = [f"[{colours[verdict(d)]}]{_escape(_points(d))}[/]" for d in cells.values()]
        shown.add_row(escape(name), *points)
    return shown


def _points(d: Difference) -> str:
    interval = None if math.isnan(d.low) else (100 * d.low, 100 * d.high)
    return with_interval(100 * d.mean, interval, sign=True)


def markdown(table: Grid, scale: float = 100, digits: int = 1) -> str:
    """As Markdown; every number with its interval, by default in percent."""
    columns = list(next(iter(table.values())))
    rows = {name: [cells[c].show(scale, digits) for c in columns] for name, cells in table.items()}
    return _markdown(columns, rows)


def markdown_differences(rows: dict[str, dict[str, Difference]]) -> str:
    """As Markdown, in points of accuracy."""
    columns = list(next(iter(rows.values())))
    return _markdown(columns, {name: [*map(_points, d.values())] for name, d in rows.items()})


def _markdown(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    heads = [plain(_heading(column)) for column in columns]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(columns)]
    lines += [f"| {plain(name)} | {' | '.join(entries)} |" for name, entries in rows.items()]
    return "\n".join(lines) + "\n"
