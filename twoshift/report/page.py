"""One self-contained page of results: tables beside the paper's, plots, warnings, facts."""

from __future__ import annotations

import base64
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from twoshift.bench.cell import Cell
from twoshift.bench.result import Result
from twoshift.bench.store import Failure
from twoshift.bench.table import MEAN
from twoshift.errors import SettingError
from twoshift.report.columns import degree, heading
from twoshift.report.compare import ComparedRow, Comparison, Measurement, Number
from twoshift.report.html import fill
from twoshift.report.numbers import decimal, with_interval
from twoshift.storage import storage_errors

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 300, 40, 26  # of the plot of accuracy
SMALL_WIDTH, SMALL_HEIGHT = 200, 90  # of one of the small multiples
POINTS = 60  # per line of a small multiple
IMAGES = {".svg": "image/svg+xml", ".png": "image/png"}
TOTALS: dict[str, Callable[..., float]] = {"seconds": operator.add, "peak_memory_mb": max}


@dataclass
class Facts:
    """Conditions under which results were measured, counted while the results are read."""

    results: int = 0
    images: int = 0
    values: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    numbers: dict[str, float] = field(default_factory=dict)

    def over(self, results: Iterator[Result]) -> Iterator[Result]:
        """Pass results on, and count them."""
        for result in results:
            self.results += 1
            self.images += int(result.metrics["images"] or 0)
            source, facts = result.source, dict(result.facts)
            for name, combine in TOTALS.items():
                self.numbers[name] = combine(self.numbers.get(name, 0), facts.pop(name, None) or 0)
            facts["network"] = f"{source.architecture}, width {source.width}"
            facts["weights"] = f"{source.dataset} {source.norm}: {source.weights[:12]}"
            for name, value in facts.items():
                self.values[name][str(value)] += 1
            yield result

    def shown(self) -> list[tuple[str, list[tuple[str, int]]]]:
        """Every fact with its values and their counts, most frequent first."""
        return [
            (name.replace("_", " "), sorted(counts.items(), key=lambda c: (-c[1], c[0])))
            for name, counts in self.values.items()
        ]


class Figure(NamedTuple):
    """A picture to embed."""

    name: str
    data: str

    @classmethod
    def read(cls, path: Path) -> Figure:
        """Read an SVG or PNG file; it is embedded as an image, so that no script in it is run."""
        if path.suffix not in IMAGES:
            raise SettingError("a figure", must_be="an .svg or .png file", got=path)
        with storage_errors("cannot read", path):
            coded = base64.b64encode(path.read_bytes()).decode()
        return cls(path.stem.replace("_", " "), f"data:{IMAGES[path.suffix]};base64,{coded}")


class Line(NamedTuple):
    """A line of a plot, in its coordinates."""

    name: str
    points: str
    dots: list[tuple[float, float, str]]
    bars: list[tuple[float, float, float]]
    dashed: bool


class Plot(NamedTuple):
    """Accuracy against label shift."""

    lines: list[Line]
    across: list[tuple[float, str]]
    up: list[tuple[float, str]]


class Estimate(NamedTuple):
    """A label estimate over time and the truth, in the coordinates of a small multiple."""

    labels: str
    points: str
    truth: float
    error: float


class Panel(NamedTuple):
    """The label estimates of one method."""

    row: str
    stream: str
    estimates: list[Estimate]


def render(
    comparisons: Sequence[Comparison],
    facts: Facts,
    get: Callable[[str], Result | None],
    failures: Sequence[Failure] = (),
    figures: Sequence[Figure] = (),
) -> str:
    """The page.

    Args:
        comparisons: The tables, one section each.
        facts: The conditions, counted.
        get: Finds a result with its trace, by key.
        failures: Cells that could not be measured.
        figures: More pictures.
    """
    return fill(
        "page.html",
        tables=[_view(c, get) for c in comparisons],
        facts=facts,
        failures=[(_described(f.cell), f.error.strip().splitlines()[-1]) for f in failures],
        figures=figures,
        size=(WIDTH, HEIGHT, LEFT, BOTTOM),
        small=(SMALL_WIDTH, SMALL_HEIGHT),
        MEAN=MEAN,
    )


def _view(table: Comparison, get: Callable[[str], Result | None]) -> dict[str, Any]:
    warnings: dict[tuple[str, str], list[str]] = defaultdict(list)
    for a in table.alarms:
        warnings[a.row, a.column].append(f"{a.what}: {a.streams} of {a.of} streams")
    by_labels = all(row.numbers.keys() - {MEAN} <= row.by_labels.keys() for row in table.rows)
    return {
        "content": table,
        "columns": [*table.columns, MEAN],
        "heat": _heat(table),
        "warnings": warnings,
        "plot": shift_plot(table.rows),
        "panels": panels(table, get),
        "kind": "corruption" if by_labels else "part",
    }


def _heat(table: Comparison) -> dict[tuple[str, str], float]:
    """The position of every number between the lowest and the highest of its column, 0 to 1."""
    heat = {}
    for column in (*table.columns, MEAN):
        ours = {row.name: row.numbers[column].ours for row in table.rows if column in row.numbers}
        low, reach = min(ours.values()), max(ours.values()) - min(ours.values())
        for name, value in ours.items():
            heat[name, column] = (value - low) / reach if reach else 0.0
    return heat


def shift_plot(rows: Sequence[ComparedRow]) -> Plot | None:
    """Accuracy against label shift, a line per row; None for a single label distribution."""
    rows = [row for row in rows if row.by_labels]
    labels = sorted({name for row in rows for name in row.by_labels}, key=degree)
    if len(labels) < 2:
        return None
    ends = [v for row in rows for n in row.by_labels.values() for v in _reach(n)]
    low, high = 10 * math.floor(min(ends) / 10), 10 * math.ceil(max(ends) / 10)
    low, high = min(low, 90), min(max(high, low + 10), 100)

    def across(i: float) -> float:
        return LEFT + 20 + i * (WIDTH - LEFT - 40) / (len(labels) - 1)

    def up(value: float) -> float:
        return (HEIGHT - BOTTOM) - (value - low) / (high - low) * (HEIGHT - BOTTOM - 10)

    lines = []
    for i, row in enumerate(rows):
        nudge = 0.03 * (i - (len(rows) - 1) / 2) / len(rows) * len(labels)  # bars side by side
        dots, bars = [], []
        for name, n in row.by_labels.items():
            x = across(labels.index(name) + nudge)
            least, most = _reach(n)
            text = with_interval(n.ours, n.interval and (least, most))
            dots.append((x, up(n.ours), f"{row.name}, {heading(name)}: {text}"))
            bars.append((x, up(least), up(most)))
        points = " ".join(f"{decimal(x)},{decimal(y)}" for x, y, _ in dots)
        lines.append(Line(row.name, points, dots, bars, row.oracle))
    step = 10 if high - low <= 60 else 20
    ticks = [(up(v), str(v)) for v in range(low, high + 1, step)]
    return Plot(lines, [(across(i), heading(name)) for i, name in enumerate(labels)], ticks)


def _reach(number: Number) -> tuple[float, float]:
    """The interval, clipped to 0 and 100 %."""
    low, high = number.interval or (number.ours, number.ours)
    return max(low, 0.0), min(high, 100.0)


def panels(table: Comparison, get: Callable[[str], Result | None]) -> list[Panel]:
    """Label estimates over time: for every row, streams of three label distributions."""
    result = []
    for row in table.rows:
        streams: dict[str, list[Measurement]] = defaultdict(list)
        for column in table.columns:
            for measurement in table.measurements.get((row.name, column), ()):
                streams[measurement.stream[1]].append(measurement)
        estimates, names = [], set()
        shifts = sorted(streams, key=degree)
        first_middle_last = (shifts[i] for i in (0, len(shifts) // 2, -1))
        for labels in dict.fromkeys(first_middle_last):
            first = min(streams[labels], key=lambda m: (m.stream, m.pair))
            if (estimate := _estimate(labels, get(first.key))) is not None:
                estimates.append(estimate)
                names.add(first.stream[0])
        if estimates:
            result.append(Panel(row.name, ", ".join(sorted(names)), estimates))
    return result


def _estimate(labels: str, result: Result | None) -> Estimate | None:
    if result is None or not (s := (result.trace or {}).get("s")):
        return None
    steps = max(len(s) - 1, 1)
    batches = sorted({round(i * steps / (POINTS - 1)) for i in range(POINTS)} & {*range(len(s))})
    points = " ".join(
        f"{decimal(i / steps * SMALL_WIDTH, 0)},{decimal(_level(s[i]))}" for i in batches
    )
    error = result.metrics["s_error_final"] or 0.0
    return Estimate(labels, points, _level(s[-1] - error), error)


def _level(s: float) -> float:
    return (1 - s) / 2 * SMALL_HEIGHT


def _described(cell: Cell) -> str:
    adapter = "" if cell.adapter is None else f" + {cell.adapter} adapter"
    arrival = f"{cell.arrival}, " if cell.arrival else ""
    return f"{cell.method}{adapter}, {cell.corruption}, {cell.labels}, {arrival}seed {cell.seed}"
