"""Whether methods rank as in the paper: a section of ``docs/reproduction.md``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import spearmanr

from reproduction import markdown
from reproduction.claims import compare_tables, table, whole_mean
from reproduction.records import Record
from twoshift.bench.table import MEAN
from twoshift.report.columns import heading

TABLE = "table1-cifar10"
COLUMNS = ("forward-50", "uniform", "backward-50", MEAN)
ADAPTER = "+Ours"  # part of the name of a row with the adapter
Numbers = dict[str, list[float]]  # by row, one per column
ALL, PLAIN = "all rows", "rows without the adapter"
OPENING = """\
## The order of the methods

Ranks among the rows of the paper's Table 1, here and *in the paper*, with the default exponents and
learning rates of this package. Rows that were not measured on every corruption are left out.
"""


def section(records: Sequence[Record]) -> str:
    """A line per row, two ranks per column; empty if fewer than two rows are whole."""
    ours, theirs = _numbers(records)
    if len(ours) < 2:
        return ""
    ranks = [
        _ranks([numbers[row][i] for row in ours])
        for i in range(len(COLUMNS))
        for numbers in (ours, theirs)
    ]
    rows = []
    for row, row_ranks in zip(ours, zip(*ranks, strict=True), strict=True):
        entries = [f"*{rank}*" if i % 2 else str(rank) for i, rank in enumerate(row_ranks)]
        rows.append([row, *entries])
    heads = [head for column in COLUMNS for head in (heading(column), "*paper*")]
    sentences = []
    for name, correlations in _agreement(ours, theirs).items():
        values = [f"{heading(column)} {value:+.2f}" for column, value in correlations.items()]
        sentences.append(f"Spearman's rank correlation, {name}: {', '.join(values)}.")
    return "\n".join([OPENING, markdown.table(["", *heads], rows), "  \n".join(sentences), ""])


def agreement(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Rank correlation with the paper by column: of all rows, and of those without the adapter."""
    return _agreement(*_numbers(records))


def _agreement(ours: Numbers, theirs: Numbers) -> dict[str, dict[str, float]]:
    plain = [row for row in ours if ADAPTER not in row]
    return {
        name: {
            column: float(spearmanr(*([n[r][i] for r in rows] for n in (ours, theirs))).statistic)
            for i, column in enumerate(COLUMNS)
        }
        for name, rows in ((ALL, [*ours]), (PLAIN, plain))
        if len(rows) > 2
    }


def _numbers(records: Sequence[Record]) -> tuple[Numbers, Numbers]:
    """Our accuracies and the paper's, of the rows that were measured on every corruption."""
    comparisons, layout = compare_tables([TABLE], records), table(TABLE)
    ours: Numbers = {}
    theirs: Numbers = {}
    for row in layout.rows if comparisons else ():
        streams = comparisons[TABLE].measurements
        means = {c: whole_mean(streams.get((row, c), ()), TABLE) for c in layout.columns}
        values = [mean for mean in means.values() if mean is not None]
        if len(values) == len(means) and (row, MEAN) in layout.paper:
            by_column = dict(zip(means, values, strict=True)) | {MEAN: float(np.mean(values))}
            ours[row] = [by_column[column] for column in COLUMNS]
            theirs[row] = [layout.paper[row, column] for column in COLUMNS]
    return ours, theirs


def _ranks(values: Sequence[float]) -> list[int]:
    return [1 + sum(other > value for other in values) for value in values]
