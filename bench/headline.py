"""What the README shows of Table 1: the rows that matter, and accuracy against label shift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.claims import FEWEST, PROFILE, by_corruption, measured, table
from bench.runner import Result
from twoshift.metrics import paired_difference
from twoshift.report import draw, tables
from twoshift.report.compare import Seen

TABLE = "table1-cifar10"
RECOMMENDED, RIVAL = "Recommended", "IABN+Ours (lambdas 1 -1 -2 lr 1e-3)"
ROWS = {  # of the table, and what the README calls them
    "Source": "Source model",
    "BN Stats": "BN statistics",
    "TENT": "TENT",
    "TENT+Ours (lambdas 1 -1.5 -3)": "TENT + adapter",
    "IABN (lr 1e-3)": "IABN",
    RIVAL: "IABN + adapter",
    RECOMMENDED: "**recommended**",
    f"{RECOMMENDED} (oracle)": "*recommended, told the labels*",
}
START, END = "<!-- results:start -->\n", "<!-- results:end -->"


def text(records: Sequence[Result]) -> str:
    """The table, in words what it is, and the paired comparison."""
    known = measured([TABLE], records)[TABLE]
    columns = table(TABLE).columns
    corruptions = sorted({s.stream[0] for seen in known.seen.values() for s in seen})
    heads = [*map(tables.shift_name, columns), "mean"]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for row, name in ROWS.items():
        if any((row, column) not in known.seen for column in columns):
            continue  # not measured yet
        numbers = [_mean(known.seen[row, column]) for column in columns]
        shown = " | ".join(f"{n:.1f}" for n in [*numbers, float(np.mean(numbers))])
        lines.append(f"| {name} | {shown} |")
    of = "all 15 corruptions" if len(corruptions) == 15 else f"{len(corruptions)} corruptions"
    return "\n".join(
        [
            f"CIFAR-10, long-tailed 100 to 1 in training; {of} of CIFAR-10-C at severity 5 "
            "(generated), accuracy in %.",
            "A slim ResNet-18 (width 16), one training, one seed: not the paper's numbers.",
            "",
            *lines,
            "",
            _comparison(known.seen, columns),
            f"By `make table1-results`; all rows in [results/{TABLE}.md](results/{TABLE}.md).",
            "Settings were chosen on other images, corruptions and label distributions.",
            "",
        ]
    )


def _comparison(seen: Any, columns: Sequence[str]) -> str:
    pairs = by_corruption(seen, RECOMMENDED, RIVAL, columns)
    if not pairs:
        return "`recommended` was not measured."
    ours, theirs = zip(*pairs.values(), strict=True)
    gain, low, high = paired_difference(ours, theirs)
    span = f", 95 % interval over corruptions {low:+.1f} to {high:+.1f}"
    return (
        f"`recommended` against IABN + adapter, on the same streams: {gain:+.1f} points"
        f"{span if len(pairs) >= FEWEST else ''}."
    )


def _mean(seen: Sequence[Seen]) -> float:
    return float(np.mean([100 * s.accuracy for s in seen]))


def figure(records: Sequence[Result]) -> Any:
    """Accuracy against the degree of label shift."""
    asked = table(TABLE)
    names = {row: name.strip("*") for row, name in ROWS.items()}
    placed = [(r, asked.place(r)) for r in records]
    found = {id(r): p.row for r, p in placed if p and p.profile == PROFILE and p.row in names}
    chosen = [r for r in records if id(r) in found]
    lines = tables.grid(chosen, row=lambda r: names[found[id(r)]])
    count = len({r["cell"]["corruption"] for r in chosen})
    panel = {f"mean of {count} corruptions": {n: lines[n] for n in names.values() if n in lines}}
    return draw.accuracy(panel, "Accuracy under both shifts (CIFAR-10, corrupted)")


def put(readme: str, made: str) -> str:
    """The README with ``made`` between its markers."""
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{made}{END}{after}"
