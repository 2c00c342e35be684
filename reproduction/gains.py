"""The share of the true labels' gain that an estimate reaches: a table of ``docs/beyond.md``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reproduction import markdown
from reproduction.claims import Streams, compare_tables, differences, table
from reproduction.records import Record
from twoshift.report.columns import heading

TABLE = "beyond-cifar10"
IABN, IABN_ORACLE = "IABN (lr 1e-3)", "IABN+Ours (oracle lr 1e-3)"
IABN_LOGIT_ORACLE = "IABN+logit (oracle lr 1e-3)"
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
    "Recommended 0.1": ("Matched", "Recommended 0.1 (oracle)"),
    "Recommended": ("Streamed", "Recommended (oracle)"),
}


def section(records: Sequence[Record]) -> str:
    """A line per row, a column per label distribution."""
    columns = table(TABLE).columns
    comparison = compare_tables([TABLE], records).get(TABLE)
    streams = comparison.measurements if comparison else {}
    entries = {
        row: [_entry(streams, row, *bounds, column) for column in columns]
        for row, bounds in BOUNDS.items()
    }
    rows = [[row, *texts] for row, texts in entries.items() if any(texts)]
    return markdown.table(["", *map(heading, columns)], rows)


def _entry(streams: Streams, row: str, without: str, oracle: str, column: str) -> str:
    estimate, truth = (differences(streams, name, without, [column]) for name in (row, oracle))
    corruptions = sorted(estimate.keys() & truth.keys())
    if not corruptions:
        return ""
    gained, possible = (np.mean([gain[c] for c in corruptions]) for gain in (estimate, truth))
    return f"{gained:+.1f} of {possible:+.1f}"
