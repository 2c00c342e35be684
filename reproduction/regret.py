"""Whether doing nothing would have been better: a section of ``docs/beyond.md``.

A column is the mean over corruptions of streams of one kind. It is a regret if the whole 95 %
interval of the paired difference lies more than `MARGIN` below the better of the source model and
batch statistics; for small batches, whose statistics nobody would use, below the source model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from reproduction import markdown
from reproduction.claims import FEWEST, Interval, compare_tables, differences
from reproduction.records import Record
from twoshift.metrics import mean_interval
from twoshift.report.columns import heading
from twoshift.report.compare import Comparison

TABLES = (
    "streams-cifar10",
    "recommended-cifar10",
    "mild-cifar10",
    "streams-models",
    "streams-others",
)
LABELS = {"mild-cifar10": "little changed: "}  # where columns have the names of another table's
OURS = ("Recommended", "Recommended one by one")
SOURCE, BATCH = "Source", "BN Stats"
MARGIN, SMALL, WORST = 1.0, 16, 10  # points; images of a batch; cells to print
NUMBERS = ("corruptions", "Source", "BN stats", "recommended", "difference")


class Column(NamedTuple):
    """A kind of streams of one network, with what was measured there."""

    place: str
    accuracies: dict[str, float]  # by row, in percent
    rival: str
    parts: dict[str, float]  # points above the rival, by corruption

    @property
    def difference(self) -> float:
        """Points above the rival."""
        return float(np.mean(list(self.parts.values())))

    @property
    def interval(self) -> Interval | None:
        """95 % interval over corruptions; None if there are too few."""
        return mean_interval(list(self.parts.values())) if len(self.parts) >= FEWEST else None

    @property
    def verdict(self) -> str:
        """Regret if the whole interval is below the margin, none if all of it is above."""
        if self.interval is None:
            return "too few corruptions"
        low, high = self.interval
        return "**regret**" if high < -MARGIN else "none" if low > -MARGIN else "open"


def columns(records: Sequence[Record]) -> list[Column]:
    """Every column that was measured, each once."""
    found, seen = [], set[frozenset[str]]()
    comparisons = compare_tables(TABLES, records)
    for name in TABLES:
        for keys, column in _of_table(comparisons[name]) if name in comparisons else ():
            if keys not in seen:  # tables share streams
                seen.add(keys)
                found.append(column._replace(place=LABELS.get(name, "") + column.place))
    return found


def _of_table(comparison: Comparison) -> Iterator[tuple[frozenset[str], Column]]:
    streams = comparison.measurements
    for row in (row.name for row in comparison.rows):
        group, _, name = row.rpartition(": ")
        if name not in OURS:
            continue
        prefix = f"{group}: " if group else ""
        for column in comparison.columns:
            ours = streams.get((row, column), [])
            rivals = [SOURCE]
            if ours and min(m.batch_size for m in ours) >= SMALL:
                rivals.append(BATCH)
            parts = {r: differences(streams, row, prefix + r, [column]) for r in rivals}
            parts = {r: of_rival for r, of_rival in parts.items() if of_rival}
            if not parts:
                continue
            rival = min(parts, key=lambda r: np.mean(list(parts[r].values())))
            place = f"{prefix}{heading(column)}{name.removeprefix('Recommended')}"
            same = {m.stream for m in ours}  # one row may have more corruptions than another
            spots = {r: streams.get((prefix + r, column), ()) for r in (SOURCE, BATCH)}
            each = {r: [m.accuracy for m in of_r if m.stream in same] for r, of_r in spots.items()}
            means = {r: 100 * float(np.mean(found)) for r, found in each.items() if found}
            means["Recommended"] = float(np.mean([100 * m.accuracy for m in ours]))
            yield frozenset(m.key for m in ours), Column(place, means, rival, parts[rival])


def section(records: Sequence[Record]) -> str:
    """A line per column, and the worst single streams."""
    measured = columns(records)
    if not measured:
        return "Not measured.\n"
    heads = ["network and stream", *NUMBERS, "regret"]
    table = markdown.table(heads, [_row(column) for column in measured], NUMBERS)
    count = {v: sum(c.verdict == v for c in measured) for v in ("**regret**", "open", "none")}
    total = (
        f"{len(measured)} columns: regret in {count['**regret**']}, open {count['open']}, none in "
        f"{count['none']}."
    )
    cells = sorted(
        (difference, column.place, corruption, column.rival)
        for column in measured
        for corruption, difference in column.parts.items()
    )
    worst = markdown.table(
        ["network and stream", "corruption", "compared with", "difference"],
        [[place, heading(c), rival, f"{d:+.1f}"] for d, place, c, rival in cells[:WORST]],
        NUMBERS,
    )
    return "\n".join([total, "", table, f"The {WORST} worst single streams:", "", worst])


def _row(column: Column) -> list[str]:
    known = column.accuracies
    shown = [f"{known[r]:.1f}" if r in known else "" for r in (SOURCE, BATCH)]
    difference = f"{column.difference:+.1f}"
    if column.interval is not None:
        difference += f" [{column.interval[0]:+.1f}, {column.interval[1]:+.1f}]"
    numbers = [*shown, f"{known['Recommended']:.1f}", difference]
    return [column.place, str(len(column.parts)), *numbers, column.verdict]
