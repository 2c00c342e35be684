"""The share of the true labels' gain that an estimate reaches: a section of ``docs/beyond.md``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reproduction import markdown
from reproduction.claims import Streams, by_corruption, compare_tables, table
from reproduction.records import Record
from twoshift.report.columns import heading

TABLE = "beyond-cifar10"
IABN, IABN_ORACLE, IABN_LOGIT_ORACLE = (
    "IABN (lr 1e-3)",
    "IABN+Ours (oracle lr 1e-3)",
    "IABN+logit (oracle lr 1e-3)",
)
BOUNDS = {  # row: the same method without a label distribution, and with the true one
    "TENT+Ours (lambdas 1 -1.5 -3)": ("TENT", "TENT+Ours (oracle)"),
    "TENT+Ours (decayed counts)": ("TENT", "TENT+Ours (oracle)"),
    "TENT+Ours (readout)": ("TENT", "TENT+Ours (oracle)"),
    "TENT+logit (readout)": ("TENT", "TENT+logit (oracle)"),
    "IABN+Ours (lambdas 1 -1 -2 lr 1e-3)": (IABN, IABN_ORACLE),
    "IABN+Ours (lr 1e-3)": (IABN, IABN_ORACLE),
    "IABN+Ours (decayed counts)": (IABN, IABN_ORACLE),
    "IABN+Ours (readout)": (IABN, IABN_ORACLE),
    "IABN+logit (readout)": (IABN, IABN_LOGIT_ORACLE),
    "IABN+logit (em)": (IABN, IABN_LOGIT_ORACLE),
    "IABN+classwise (em)": (IABN, "IABN+classwise (oracle)"),
    "Matched+logit (em)": ("Matched", "Matched+logit (oracle)"),
    "Recommended": ("Matched", "Recommended (oracle)"),
}
OPENING = """\
## How much of the true labels' gain

Points gained over the same method without a label distribution, *of* the points that it gains with
the true label distribution, on the same streams. An estimate may gain more than the truth: an
adapter does not always make the best of the true distribution. Rows that were not measured are left
out.
"""


def section(records: Sequence[Record]) -> str:
    """A line per row, a column per label distribution."""
    columns = table(TABLE).columns
    comparison = compare_tables([TABLE], records).get(TABLE)
    streams = comparison.measurements if comparison else {}
    rows = []
    for row, (without, oracle) in BOUNDS.items():
        entries = [_entry(streams, row, without, oracle, column) for column in columns]
        if any(entries):
            rows.append([row, *entries])
    return f"{OPENING}\n{markdown.table(['', *map(heading, columns)], rows)}"


def _entry(streams: Streams, row: str, without: str, oracle: str, column: str) -> str:
    estimate, truth = (by_corruption(streams, name, without, [column]) for name in (row, oracle))
    corruptions = sorted(estimate.keys() & truth.keys())
    if not corruptions:
        return ""
    gained, possible = (
        np.mean([pairs[c][0] - pairs[c][1] for c in corruptions]) for pairs in (estimate, truth)
    )
    return f"{gained:+.1f} of {possible:+.1f}"
