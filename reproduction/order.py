"""Whether methods stand in the paper's order: a section of ``docs/reproduction.md``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import spearmanr

from reproduction.claims import measured, table, whole_mean
from reproduction.records import Record
from twoshift.bench.table import MEAN
from twoshift.report.layout import heading

TABLE = "table1-cifar10"
SHOWN = ("forward-50", "uniform", "backward-50", MEAN)
ADAPTED = "+Ours"
Numbers = dict[str, list[float]]  # by row, in the columns shown
ALL, PLAIN = "all rows", "rows without the adapter"
OPENING = """\
## The order of the methods

Ranks among the rows of the paper's Table 1, here and *in the paper*, with the default exponents and
learning rates of this package. A row that was not measured on every corruption is left out.
"""


def section(records: Sequence[Record]) -> str:
    """A line per row, two ranks per column; nothing where fewer than two rows are whole."""
    ours, theirs = _numbers(records)
    if len(ours) < 2:
        return ""
    heads = [f"{heading(column)} | *paper*" for column in SHOWN]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * 2 * len(SHOWN)]
    ranks = [
        _ranks([found[row][i] for row in ours])
        for i in range(len(SHOWN))
        for found in (ours, theirs)
    ]
    for row, places in zip(ours, zip(*ranks, strict=True), strict=True):
        shown = [f"*{rank}*" if i % 2 else str(rank) for i, rank in enumerate(places)]
        lines.append(f"| {row} | {' | '.join(shown)} |")
    said = []
    for name, found in _agreement(ours, theirs).items():
        shown = [f"{heading(column)} {value:+.2f}" for column, value in found.items()]
        said.append(f"Spearman's rank correlation, {name}: {', '.join(shown)}.")
    return "\n".join([OPENING, *lines, "", "  \n".join(said), ""])


def agreement(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Rank correlation with the paper by column: of all rows, and of those without the adapter."""
    return _agreement(*_numbers(records))


def _agreement(ours: Numbers, theirs: Numbers) -> dict[str, dict[str, float]]:
    plain = [row for row in ours if ADAPTED not in row]
    return {
        name: {
            column: float(spearmanr(*([n[r][i] for r in rows] for n in (ours, theirs))).statistic)
            for i, column in enumerate(SHOWN)
        }
        for name, rows in ((ALL, [*ours]), (PLAIN, plain))
        if len(rows) > 2
    }


def _numbers(records: Sequence[Record]) -> tuple[Numbers, Numbers]:
    """Accuracies of the rows that are whole, ours and the paper's, in the columns shown."""
    known, asked = measured([TABLE], records), table(TABLE)
    ours: Numbers = {}
    theirs: Numbers = {}
    for row in asked.rows if known else ():
        found = {c: whole_mean(known[TABLE].seen.get((row, c), ()), TABLE) for c in asked.columns}
        there = [value for value in found.values() if value is not None]
        if len(there) == len(found) and (row, MEAN) in asked.paper:
            whole = {**dict(zip(found, there, strict=True)), MEAN: float(np.mean(there))}
            ours[row] = [whole[column] for column in SHOWN]
            theirs[row] = [asked.paper[row, column] for column in SHOWN]
    return ours, theirs


def _ranks(values: Sequence[float]) -> list[int]:
    return [1 + sum(other > value for other in values) for value in values]
