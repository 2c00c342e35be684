"""How much of what the true labels would bring, their estimate brings: for ``docs/beyond.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from reproduction.claims import by_corruption, measured, table
from reproduction.records import Record
from twoshift.report.compare import Seen, Spot
from twoshift.report.layout import heading

TABLE = "beyond-cifar10"
IABN, IABN_TOLD, IABN_LOGIT_TOLD = (
    "IABN (lr 1e-3)",
    "IABN+Ours (oracle lr 1e-3)",
    "IABN+logit (oracle lr 1e-3)",
)
BOUNDS = {  # row: what it is without any label distribution, and what it is with the true one
    "TENT+Ours (lambdas 1 -1.5 -3)": ("TENT", "TENT+Ours (oracle)"),
    "TENT+Ours (decayed counts)": ("TENT", "TENT+Ours (oracle)"),
    "TENT+Ours (readout)": ("TENT", "TENT+Ours (oracle)"),
    "TENT+logit (readout)": ("TENT", "TENT+logit (oracle)"),
    "IABN+Ours (lambdas 1 -1 -2 lr 1e-3)": (IABN, IABN_TOLD),
    "IABN+Ours (lr 1e-3)": (IABN, IABN_TOLD),
    "IABN+Ours (decayed counts)": (IABN, IABN_TOLD),
    "IABN+Ours (readout)": (IABN, IABN_TOLD),
    "IABN+logit (readout)": (IABN, IABN_LOGIT_TOLD),
    "IABN+logit (em)": (IABN, IABN_LOGIT_TOLD),
    "IABN+classwise (em)": (IABN, "IABN+classwise (oracle)"),
    "Matched+logit (em)": ("Matched", "Matched+logit (oracle)"),
    "Recommended": ("Matched", "Recommended (oracle)"),
}
OPENING = """\
## How much of the true labels' gain

Points gained over the same method without a label distribution, *of* those that it gains when it is
told the true one, on the same streams. An estimate may gain more: an adapter that is told the truth
does not always make the best of it. Rows that are not measured are left out.
"""


def section(records: Sequence[Record]) -> str:
    """A line per row, a column per label distribution."""
    found = measured([TABLE], records)
    columns = table(TABLE).columns
    lines = [f"| | {' | '.join(map(heading, columns))} |", "|---|" + "---:|" * len(columns)]
    for row, (without, told) in BOUNDS.items():
        entries = [_entry(found[TABLE].seen, row, without, told, c) for c in columns if found]
        if any(entries):
            lines.append(f"| {row} | {' | '.join(entries)} |")
    return "\n".join([OPENING, *lines, ""])


def _entry(seen: Mapping[Spot, list[Seen]], row: str, without: str, told: str, column: str) -> str:
    gained, possible = (by_corruption(seen, name, without, [column]) for name in (row, told))
    both = gained.keys() & possible.keys()
    if not both:
        return ""
    ours, most = (
        np.mean([there[c][0] - there[c][1] for c in sorted(both)]) for there in (gained, possible)
    )
    return f"{ours:+.1f} of {most:+.1f}"
