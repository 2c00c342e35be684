"""Whether methods stand in the paper's order: a section of ``docs/reproduction.md``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import spearmanr

from bench.claims import Record, measured, table, whole_mean
from twoshift.bench.table import MEAN
from twoshift.report.layout import heading

TABLE = "table1-cifar10"
SHOWN = ("forward-50", "uniform", "backward-50", MEAN)
ADAPTED = "+Ours"
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
    plain = [row for row in ours if ADAPTED not in row]
    said = [
        f"Spearman's rank correlation, {name}: {_agreement(ours, theirs, rows)}."
        for name, rows in (("all rows", [*ours]), ("rows without the adapter", plain))
        if len(rows) > 2
    ]
    return "\n".join([OPENING, *lines, "", "  \n".join(said), ""])


def _numbers(records: Sequence[Record]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Accuracies of the rows that are whole, ours and the paper's, in the columns shown."""
    known, asked = measured([TABLE], records), table(TABLE)
    ours, theirs = {}, {}
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


def _agreement(
    ours: dict[str, list[float]], theirs: dict[str, list[float]], rows: Sequence[str]
) -> str:
    found = [
        float(spearmanr([ours[r][i] for r in rows], [theirs[r][i] for r in rows]).statistic)
        for i in range(len(SHOWN))
    ]
    return ", ".join(f"{heading(c)} {value:+.2f}" for c, value in zip(SHOWN, found, strict=True))
