"""Results beside the paper's, table by table: the data behind page, LaTeX, Markdown and CSV."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from twoshift import estimators
from twoshift.bench.cell import CLEAN
from twoshift.bench.result import Result
from twoshift.bench.table import MEAN, Place
from twoshift.metrics import Difference, paired_difference
from twoshift.report.caveats import Conditions, alarms, uses_estimate
from twoshift.report.columns import degree
from twoshift.report.layout import Layout, OtherResults
from twoshift.report.numbers import decimal
from twoshift.report.tables import Entry, mean_of

Pair = tuple[int, int]  # seeds of training and stream
Spot = tuple[str, str]  # row and column


class Alarm(NamedTuple):
    """A breakdown that a mean hides, and on how many streams of one row and column it happened."""

    row: str
    column: str
    what: str
    streams: int
    of: int


@dataclass(frozen=True)
class Number:
    """One number of a table.

    Attributes:
        entry: The accuracy.
        paper: The paper's number, in percent.
        missing: Number of streams that other rows have in this column, but this one lacks.
        best: Better than every row except oracles, by the interval of the paired difference.
    """

    entry: Entry
    paper: float | None = None
    missing: int = 0
    best: bool = False

    @property
    def ours(self) -> float:
        """The accuracy in percent."""
        return 100 * self.entry.mean

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval in percent; None for a single seed."""
        interval = self.entry.interval
        return None if interval is None else (100 * interval[0], 100 * interval[1])

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, in points."""
        return None if self.paper is None else self.ours - self.paper


@dataclass(frozen=True)
class ComparedRow:
    """A row of a comparison: one method.

    Attributes:
        name: Name of the row.
        oracle: Whether it knows what no deployed model knows; it competes with no other row.
        numbers: The numbers by column, including ``mean``.
        worst: The column with the lowest number.
        parts: What the numbers are means of: accuracy by corruption (or labels), then by column.
        by_labels: Accuracy by label distribution, even where that is not the column; empty where
            images arrive in different ways, too.
    """

    name: str
    oracle: bool
    numbers: dict[str, Number]
    worst: str
    parts: dict[str, dict[str, float]]
    by_labels: dict[str, Number]

    def printed(self, columns: Iterable[str]) -> list[str]:
        """The paper's numbers in some columns; empty texts where it has none."""
        numbers = map(self.numbers.get, columns)
        return ["" if n is None else decimal(n.paper, 2) for n in numbers]


class Measurement(NamedTuple):
    """What a comparison needs to know about a result."""

    key: str
    stream: tuple[str, ...]  # corruption, labels, target, order and number of images
    batch_size: int
    pair: Pair
    accuracy: float
    alarms: tuple[str, ...]


@dataclass
class Comparison:
    """A table with measured numbers beside the paper's.

    Attributes:
        title: Title of the table.
        profile: Profile of the results: ``cpu``, ``paper`` ...
        columns: Columns that have results, without the mean.
        rows: Rows that have results.
        notes: Reasons why these numbers cannot be compared with the paper's.
        alarms: Rows and columns where a method broke down.
        measurements: The results behind it, by row and column.
    """

    title: str
    profile: str
    columns: list[str]
    rows: list[ComparedRow]
    notes: list[str]
    alarms: list[Alarm]
    measurements: dict[Spot, list[Measurement]]

    @property
    def has_paper(self) -> bool:
        """Whether the paper has numbers for it."""
        return any(n.paper is not None for row in self.rows for n in row.numbers.values())


@dataclass
class _Collected:
    """The results of one table, added one by one."""

    layout: Layout
    profile: str
    measurements: dict[Spot, list[Measurement]] = field(default_factory=lambda: defaultdict(list))
    oracles: set[str] = field(default_factory=set)
    conditions: Conditions = field(default_factory=Conditions)

    def take(self, result: Result, row: str, column: str) -> None:
        """Add a result."""
        cell, source = result.cell, result.source
        self.measurements[row, column].append(
            Measurement(
                result.key,
                (cell.corruption, cell.labels, cell.target or source.dataset, cell.sequence),
                cell.batch_size,
                (source.seed, cell.seed),
                result.accuracy,
                tuple(alarms(result)),
            )
        )
        if uses_estimate(cell) and estimators.estimators[cell.estimator].is_oracle:
            self.oracles.add(row)
        self.conditions.take(result)


def compare(
    layouts: Sequence[Layout], results: Iterable[Result], rest: bool = True
) -> list[Comparison]:
    """One comparison for every table and profile that has results.

    Args:
        layouts: The tables.
        results: Results of any kind; read one by one.
        rest: Whether results that belong to no table are shown, by data set.
    """
    tables: dict[tuple[int, str, str], _Collected] = {}
    others: dict[tuple[str, bool], OtherResults] = {}
    places: dict[str, list[tuple[int, Layout, Place]]] = {}
    for result in results:
        cell = result.cell
        seedless = replace(cell, seed=0, model=cell.model and replace(cell.model, seed=0))
        same = repr((seedless, result.source.dataset))
        if same not in places:  # finding a place is slow and does not depend on seeds
            candidates = [(i, t, t.place(result)) for i, t in enumerate(layouts)]
            places[same] = [(i, t, p) for i, t, p in candidates if p is not None]
            if rest and not places[same]:
                group = (result.source.dataset, cell.corruption == CLEAN)
                other = others.setdefault(group, OtherResults(*group))
                places[same] = [(len(layouts), other, other.place(result))]
        for i, layout, (profile, row, column) in places[same]:
            order = (i, profile, "" if i < len(layouts) else layout.title)
            tables.setdefault(order, _Collected(layout, profile)).take(result, row, column)
    return [_compared(tables[order]) for order in sorted(tables)]


def _compared(collected: _Collected) -> Comparison:
    layout, measurements = collected.layout, dict(collected.measurements)
    measured_rows, measured_columns = map(set, zip(*measurements, strict=True))
    names = [r for r in layout.rows if r in measured_rows] or sorted(measured_rows)
    columns = [c for c in layout.columns if c in measured_columns]
    columns = columns or sorted(measured_columns, key=degree)
    values = {spot: _by_pair(of_spot) for spot, of_spot in measurements.items()}
    for name in names:
        values[name, MEAN] = _over_columns(name, columns, values)
    part = _part(measurements)
    rows = []
    for name in names:
        numbers = _numbers(name, columns, values, collected)
        of_row = [(c, m) for c in columns for m in measurements.get((name, c), ())]
        rows.append(
            ComparedRow(
                name,
                name in collected.oracles,
                numbers,
                worst=min((c for c in columns if c in numbers), key=lambda c: numbers[c].ours),
                parts=_parts(of_row, part),
                by_labels=_by_labels([m for _, m in of_row]),
            )
        )
    notes = []
    if layout.paper:
        expected = layout.paper_cells(names)
        notes = collected.conditions.notes(expected, len(columns), len(layout.columns))
    raised = _alarms(measurements, names, columns)
    return Comparison(layout.title, collected.profile, columns, rows, notes, raised, measurements)


def _alarms(
    measurements: Mapping[Spot, list[Measurement]], rows: Sequence[str], columns: Sequence[str]
) -> list[Alarm]:
    """How many streams of every row and column raise which alarm, in the order of the table."""
    raised = []
    for spot in itertools.product(rows, columns):
        of_spot = measurements.get(spot, [])
        counts = Counter(what for m in of_spot for what in m.alarms)
        raised += [Alarm(*spot, what, n, len(of_spot)) for what, n in sorted(counts.items())]
    return raised


ByPair = dict[Pair, dict[tuple[str, ...], float]]


def _by_pair(results: Iterable[Measurement]) -> ByPair:
    values: ByPair = defaultdict(dict)
    for measurement in results:
        values[measurement.pair][measurement.stream] = measurement.accuracy
    return dict(values)


def _over_columns(row: str, columns: Sequence[str], values: Mapping[Spot, ByPair]) -> ByPair:
    """The streams of all columns, for the seeds that all columns of the row have."""
    own = {c: values[row, c] for c in columns if (row, c) in values}
    pairs = set.intersection(*(set(v) for v in own.values()))
    return {p: {(c, *s): a for c in own for s, a in own[c][p].items()} for p in sorted(pairs)}


def _entry(values: ByPair) -> Entry:
    pairs = tuple(sorted(values))
    return Entry(tuple(float(np.mean(list(values[p].values()))) for p in pairs), pairs)


def _numbers(
    row: str, columns: Sequence[str], values: Mapping[Spot, ByPair], collected: _Collected
) -> dict[str, Number]:
    paper, oracles = collected.layout.paper, collected.oracles
    rivals = set() if row in oracles else {r for r, _ in collected.measurements} - oracles - {row}
    numbers: dict[str, Number] = {}
    streams = {spot: sum(map(len, of_spot.values())) for spot, of_spot in values.items()}
    most = {c: max(n for (_, column), n in streams.items() if column == c) for c in columns}
    missing = {c: most[c] - streams.get((row, c), 0) for c in columns}
    for column in columns:
        if (row, column) in values:
            numbers[column] = Number(
                _entry(values[row, column]),
                paper.get((row, column)),
                missing[column],
                best=not missing[column] and _best(row, column, rivals, values),
            )
    same_seeds = len({n.entry.seeds for n in numbers.values()}) == 1
    entry = mean_of([n.entry for n in numbers.values()])
    whole = numbers.keys() == set(collected.layout.columns)
    printed = [paper[row, c] for c in numbers if (row, c) in paper]
    # the paper's mean is over all columns: take it over those that we have
    like_ours = float(np.mean(printed)) if len(printed) == len(numbers) else None
    numbers[MEAN] = Number(
        entry,
        paper.get((row, MEAN), like_ours) if whole else like_ours,
        missing=(lacking := sum(missing.values())),
        best=same_seeds and not lacking and _best(row, MEAN, rivals, values),
    )
    return numbers


def _best(row: str, column: str, rivals: Iterable[str], values: Mapping[Spot, ByPair]) -> bool:
    others = [values[r, column] for r in rivals if (r, column) in values]
    gains = [paired(values[row, column], other) for other in others]
    return bool(gains) and all(gain is not None and gain.low > 0 for gain in gains)


def paired(a: ByPair, b: ByPair) -> Difference | None:
    """Mean of a - b over the streams that both have; None for fewer than two seeds."""
    left, right = [], []
    for pair in sorted(a.keys() & b.keys()):
        if common := a[pair].keys() & b[pair].keys():
            left.append(float(np.mean([a[pair][s] for s in sorted(common)])))
            right.append(float(np.mean([b[pair][s] for s in sorted(common)])))
    return paired_difference(left, right) if len(left) > 1 else None


def _part(measurements: Mapping[Spot, list[Measurement]]) -> Callable[[Measurement], str]:
    """A function that names a stream within its column, by what differs there."""
    values: dict[tuple[int, str], set[str]] = defaultdict(set)
    for (_, column), of_spot in measurements.items():
        for m in of_spot:
            for i, value in enumerate(m.stream):
                values[i, column].add(value)
    differs = sorted({i for (i, _), of_kind in values.items() if len(of_kind) > 1}) or [0]
    return lambda m: ", ".join(m.stream[i] for i in differs)


def _parts(
    results: Iterable[tuple[str, Measurement]], part: Callable[[Measurement], str]
) -> dict[str, dict[str, float]]:
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for column, m in results:
        values[part(m)][column].append(m.accuracy)
    return {
        p: {c: float(np.mean(v)) for c, v in values[p].items()} for p in sorted(values, key=degree)
    }


def _by_labels(results: Sequence[Measurement]) -> dict[str, Number]:
    if len({(m.stream[3], m.batch_size) for m in results}) > 1:
        return {}
    by_labels: dict[str, list[Measurement]] = defaultdict(list)
    for m in results:
        by_labels[m.stream[1]].append(m)
    return {k: Number(_entry(_by_pair(by_labels[k]))) for k in sorted(by_labels, key=degree)}
