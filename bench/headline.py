"""What the README shows: the rows that matter, on all corruptions, and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.claims import FEWEST, PROFILE, by_corruption, measured, table
from bench.runner import Result
from twoshift.metrics import paired_difference
from twoshift.report import draw, tables
from twoshift.report.compare import Seen
from twoshift.report.layout import heading

TABLE = "recommended-cifar10"
MORE = "beyond-cifar10"  # other label distributions, on fewer corruptions
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
SHOWN = ("forward-50", "uniform", "backward-50")
OTHERS = ("permuted-50", "dirichlet-0.1")
START, END = "<!-- results:start -->\n", "<!-- results:end -->"


def text(records: Sequence[Result]) -> str:
    """The table, in words what it is, and the paired comparison."""
    known = measured([TABLE, MORE], records)
    tilts, others = known[TABLE].seen, known[MORE].seen
    seven, corruptions, few = table(TABLE).columns, _corruptions(TABLE), _corruptions(MORE)
    heads = [*map(tables.shift_name, SHOWN), "mean of 7", "worst of 7"]
    heads += [f"{heading(column)} ¹" for column in OTHERS]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for row, name in ROWS.items():
        means = {column: _mean(tilts.get((row, column), ()), TABLE) for column in seven}
        means |= {column: _mean(others.get((row, column), ()), MORE) for column in OTHERS}
        found = {column: mean for column, mean in means.items() if mean is not None}
        if len(found) < len(means):
            continue  # not measured yet
        of_seven = [found[column] for column in seven]
        numbers = [found[column] for column in SHOWN]
        numbers += [float(np.mean(of_seven)), min(of_seven), *(found[c] for c in OTHERS)]
        lines.append(f"| {name} | {' | '.join(f'{n:.1f}' for n in numbers)} |")
    return "\n".join(
        [
            "CIFAR-10, long-tailed 100 to 1 in training, under each of the "
            f"{len(corruptions)} corruptions of CIFAR-10-C at severity 5; accuracy in %.",
            "A slim ResNet-18 (width 16), one training, one seed: not the paper's numbers.",
            "",
            *lines,
            "",
            f"¹ on {len(few)} of them ({', '.join(map(heading, few))}).",
            "",
            _comparison(tilts, seven),
            f"Measured by `make recommended-results`; more in [results/{TABLE}.md]"
            f"(results/{TABLE}.md).",
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
        f"`recommended` against IABN + adapter, mean of 7, on the same streams: {gain:+.1f} points"
        f"{span if len(pairs) >= FEWEST else ''}."
    )


def _corruptions(name: str) -> list[str]:
    return list(dict.fromkeys(cell.corruption for cell in table(name).cells(PROFILE, 1)))


def _mean(seen: Sequence[Seen], name: str) -> float | None:
    """In percent; None unless every corruption of the table is there."""
    whole = len(seen) >= len(_corruptions(name))
    return float(np.mean([100 * s.accuracy for s in seen])) if whole else None


def figure(records: Sequence[Result]) -> Any:
    """Accuracy against the degree of label shift."""
    names = {row: name.strip("*") for row, name in ROWS.items()}

    def row(record: Result) -> str | None:
        place = table(TABLE).place(record)
        return names.get(place.row) if place and place.profile == PROFILE else None

    named = [(record, name) for record in records if (name := row(record))]
    rows = {record["key"]: name for record, name in named}
    lines = tables.grid([record for record, _ in named], row=lambda r: rows[r["key"]])
    panel = {n: lines[n] for n in names.values() if n in lines}
    origin = f"mean of {len(_corruptions(TABLE))} corruptions"
    return draw.accuracy({origin: panel}, "Accuracy under both shifts (CIFAR-10, corrupted)")


def put(readme: str, made: str) -> str:
    """The README with ``made`` between its markers."""
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{made}{END}{after}"
