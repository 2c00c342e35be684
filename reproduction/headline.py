"""What the README shows: the rows that matter, on all corruptions, and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reproduction import claims, markdown, order, pages
from reproduction.claims import Streams, corruptions_of, whole_means
from reproduction.records import Record
from twoshift.bench.table import MEAN
from twoshift.report import draw, tables
from twoshift.report.columns import heading, shift_name

TABLE = "recommended-cifar10"
MORE = "beyond-cifar10"  # other label distributions, on fewer corruptions
MILD = "mild-cifar10"  # where images have hardly changed
STREAMS = "streams-cifar10"  # as services meet them
RECOMMENDED = "Recommended"
WITH_IABN, WITH_TENT = "IABN+Ours (lambdas 1 -1 -2 lr 1e-3)", "TENT+Ours (lambdas 1 -1.5 -3)"
ROWS = {  # rows of the table, and their names in the README
    "Source": "Source model",
    "BN Stats": "BN statistics",
    "TENT": "TENT",
    WITH_TENT: "TENT + adapter",
    "IABN (lr 1e-3)": "IABN",
    WITH_IABN: "IABN + adapter",
    RECOMMENDED: "**recommended**",
    f"{RECOMMENDED} (oracle)": "*recommended, true labels*",
}
RIVALS = (WITH_IABN, WITH_TENT)
SERVED = {  # rows of the table of streams, and their names in the README
    "Source": "Source model",
    "BN Stats": "BN statistics",
    "TENT": "TENT",
    "LAME": "LAME",
    "NOTE": "NOTE",
    "RoTTA": "RoTTA",
    RECOMMENDED: "**recommended**",
}
COLUMNS = ("forward-50", "uniform", "backward-50")
MORE_COLUMNS = ("permuted-50", "dirichlet-0.1")
START, END = "<!-- results:start -->\n", "<!-- results:end -->"


def text(records: Sequence[Record]) -> str:
    """The table with its conditions, and the comparisons in words."""
    comparisons = claims.compare_tables([TABLE, MORE, MILD, STREAMS], records)
    tilts, others = comparisons[TABLE].measurements, comparisons[MORE].measurements
    seven, few = claims.table(TABLE).columns, corruptions_of(MORE)
    counts = pages.verdicts(records)
    heads = [*map(shift_name, COLUMNS), "mean of 7", "worst of 7"]
    heads += [f"{heading(column)} ¹" for column in MORE_COLUMNS]
    rows = []
    for row, name in ROWS.items():
        tilted = whole_means(TABLE, tilts, row, seven)
        other = whole_means(MORE, others, row, MORE_COLUMNS)
        if tilted and other:
            mean, worst = np.mean(list(tilted.values())), min(tilted.values())
            numbers = [*(tilted[column] for column in COLUMNS), mean, worst, *other.values()]
            rows.append([name, *(f"{number:.1f}" for number in numbers)])
    return pages.fill(
        "readme",
        corruptions=len(corruptions_of(TABLE)),
        rows=markdown.table(["", *heads], rows),
        few=len(few),
        few_names=", ".join(map(heading, few)),
        comparison=_comparison(tilts, seven),
        mild=_mild(comparisons[MILD].measurements),
        bursts=_served(comparisons, "bursts-0.1"),
        single=_served(comparisons, "B50 by 1"),
        comparisons=counts.total(),
        verdicts=_verdicts(counts),
        ranks=_ranks(records),
        table=TABLE,
    )


def _mild(streams: Streams) -> str:
    """The rows that were measured where the images have hardly changed, and their means."""
    accuracies = [
        f"{name} {np.mean(list(means.values())):.1f}"
        for row, name in ROWS.items()
        if (means := whole_means(MILD, streams, row, COLUMNS))
    ]
    return ", ".join(accuracies) or "not measured"


def _served(comparisons: claims.Comparisons, column: str) -> str:
    """Mean accuracies on streams of one kind, of the rows that were measured on all of them."""
    streams = comparisons[STREAMS].measurements if STREAMS in comparisons else {}
    measured = {row: streams.get((row, column), ()) for row in SERVED}
    whole = {m.stream for m in measured[RECOMMENDED]}
    accuracies = [
        f"{SERVED[row]} {np.mean([100 * m.accuracy for m in of_row]):.1f}"
        for row, of_row in measured.items()
        if of_row and {m.stream for m in of_row} == whole
    ]
    return ", ".join(accuracies) or "not measured"


def _verdicts(counts: Mapping[str, int]) -> str:
    verbs = zip(claims.VERDICTS, ("hold", "fail", "are open", "are not measured"), strict=True)
    return ", ".join(f"{counts[verdict]} {verb}" for verdict, verb in verbs if counts[verdict])


def _ranks(records: Sequence[Record]) -> str:
    correlation = order.agreement(records).get(order.PLAIN, {}).get(MEAN)
    if correlation is None:
        return ""
    return (
        " Over its methods without the adapter (those measured on every corruption), the rank "
        f"correlation with its Table 1 is {correlation:+.2f}."
    )


def _comparison(streams: Streams, columns: Sequence[str]) -> str:
    gains = []
    for row in RIVALS:
        f = claims.against(streams, RECOMMENDED, row, columns)
        if f.interval is None:
            return "`recommended` was not measured."
        low, high = f.interval
        gains.append(f"{f.ours:+.1f} points over {ROWS[row]} ({low:+.1f} to {high:+.1f})")
    return (
        f"`recommended`, mean of 7, on the same streams, with 95 % intervals over corruptions: "
        f"{'; '.join(gains)}."
    )


def figure(records: Sequence[Record]) -> Any:
    """Accuracy against the degree of label shift."""
    names, rows = {row: name.strip("*") for row, name in ROWS.items()}, {}
    for record in records:
        place = claims.table(TABLE).place(record)
        if place and place.profile == claims.PROFILE and place.row in names:
            rows[record.key] = names[place.row]
    lines = tables.grid([r for r in records if r.key in rows], row=lambda r: rows[r.key])
    panel = {n: lines[n] for n in names.values() if n in lines}
    origin = f"mean of {len(corruptions_of(TABLE))} corruptions"
    return draw.accuracy({origin: panel}, "Accuracy under both shifts (CIFAR-10, corrupted)")


def insert(readme: str, results: str) -> str:
    """The README with ``results`` between its markers."""
    before, _, rest = readme.partition(START)
    return f"{before}{START}{results}{END}{rest.partition(END)[2]}"
