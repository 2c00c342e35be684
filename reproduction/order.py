"""Whether methods rank as in the paper: a section of ``docs/reproduction.md``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from scipy.stats import rankdata, spearmanr

from reproduction import markdown
from reproduction.claims import compare_tables, table, whole_means
from reproduction.records import Record
from twoshift.bench.table import MEAN
from twoshift.report.columns import heading

TABLE = "table1-cifar10"
COLUMNS = ("forward-50", "uniform", "backward-50", MEAN)
ADAPTER = "+Ours"  # part of the name of a row with the adapter
Accuracies = Mapping[str, Mapping[str, float]]  # by row and column
ALL, PLAIN = "all rows", "rows without the adapter"
OPENING = """\
## The order of the methods

Ranks among the rows of the paper's Table 1, here and *in the paper*, with the default exponents and
learning rates of this package. Rows that were not measured on every corruption are left out.
"""


def section(records: Sequence[Record]) -> str:
    """A line per row, two ranks per column; empty if fewer than two rows are whole."""
    ours = _accuracies(records)
    if len(ours) < 2:
        return ""
    rows = {row: [row] for row in ours}
    for column in COLUMNS:
        ranks = (rankdata(np.negative(n), "min").astype(int) for n in _numbers(ours, ours, column))
        for row, rank, paper in zip(ours, *ranks, strict=True):
            rows[row] += [str(rank), f"*{paper}*"]
    heads = [head for column in COLUMNS for head in (heading(column), "*paper*")]
    sentences = []
    for name, correlations in _agreement(ours).items():
        values = [f"{heading(column)} {value:+.2f}" for column, value in correlations.items()]
        sentences.append(f"Spearman's rank correlation, {name}: {', '.join(values)}.")
    lines = markdown.table(["", *heads], rows.values())
    return "\n".join([OPENING, lines, "  \n".join(sentences), "", ""])


def agreement(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Rank correlation with the paper by column: of all rows, and of those without the adapter."""
    return _agreement(_accuracies(records))


def _agreement(ours: Accuracies) -> dict[str, dict[str, float]]:
    plain = [row for row in ours if ADAPTER not in row]
    return {
        name: {c: float(spearmanr(*_numbers(ours, rows, c)).statistic) for c in COLUMNS}
        for name, rows in ((ALL, [*ours]), (PLAIN, plain))
        if len(rows) > 2
    }


def _numbers(ours: Accuracies, rows: Collection[str], column: str) -> list[list[float]]:
    """Our accuracies and the paper's in a column."""
    paper = table(TABLE).paper
    return [[ours[row][column] for row in rows], [paper[row, column] for row in rows]]


def _accuracies(records: Sequence[Record]) -> Accuracies:
    """Our accuracies, of the rows of the paper that were measured on every corruption."""
    comparisons, layout = compare_tables([TABLE], records), table(TABLE)
    ours = {}
    for row in layout.rows if comparisons else ():
        means = whole_means(TABLE, comparisons[TABLE].measurements, row, layout.columns)
        if means and (row, MEAN) in layout.paper:
            ours[row] = {**means, MEAN: float(np.mean(list(means.values())))}
    return ours
