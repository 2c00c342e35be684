"""What is recommended beside methods that were made for the same streams: ``docs/rivals.md``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reproduction import claims, dart, markdown, pages
from reproduction.claims import FAILS, HOLDS, OPEN, Finding, Streams
from reproduction.records import Record
from twoshift.report import draw
from twoshift.report.columns import heading

OURS = "Recommended"
SEVEN = "recommended-cifar10"
STREAMS = "streams-cifar10"
COLUMNS = (
    "forward-50",
    "uniform",
    "backward-50",
    "permuted-50",
    "dirichlet-0.1",
    "bursts-0.1",
    "sorted",
    "switch-50",
    "changing corruptions",
)
SMALL = ("F50 by 1", "B50 by 1", "F50 by 4", "B50 by 4")
PLOTTED = ("forward-50", "uniform", "backward-50", "permuted-50", "dirichlet-0.1")
FEW = ("gaussian_noise", "defocus_blur", "contrast", "jpeg_compression")  # every row has them
# rows of the tables, and the rows of `make speed` that tell what they cost
RIVALS = {
    "LAME": "lame",
    "NOTE": "note",
    "RoTTA": "rotta",
    "SAR": "sar",
    "DELTA": "delta",
    "Hybrid-TTN": "hybrid_ttn, batch",
    "Hybrid-TTN (classes)": "hybrid_ttn, classes",
    "UnMix-TNS": "unmix_tns",
    "Balanced BN": "balanced_bn",
    "TRIBE": "tribe",
    "ROID": "roid",
    "ROID (logits)": "roid",
    "DART": "dart",
}
ADAPTED = "+Ours"  # the same method with the paper's adapter
PLAIN = {"Source": "source", "BN Stats": "bn_stats", "TENT": "tent"}
COST = "recommended / forward, width 16, batches of 64"  # the check that tells its cost


LABEL = 8  # size of the labels in the figure
Box = tuple[float, float, float, float]  # left, right, bottom, top
Corner = tuple[int, int]


class Place(NamedTuple):
    """A column of a table, or the mean of all of them."""

    name: str
    streams: Streams
    columns: Sequence[str]


def places(records: Sequence[Record], columns: Sequence[str]) -> list[Place]:
    """Columns of the table of streams that have records."""
    comparison = claims.compare_tables([STREAMS], records).get(STREAMS)
    streams = {} if comparison is None else comparison.measurements
    return [Place(heading(c), streams, [c]) for c in columns if (OURS, c) in streams]


def page(
    records: Sequence[Record],
    speed: Mapping[str, Any],
    trainings: Mapping[str, Any] | None = None,
) -> str:
    """The page, made of records.

    Args:
        records: The published records.
        speed: The record of `make speed`.
        trainings: The record of DART's variants; None if there is none.
    """
    seven = claims.compare_tables([SEVEN], records).get(SEVEN)
    main = places(records, COLUMNS)
    if seven is not None:
        main.insert(0, Place("mean of 7", seven.measurements, claims.table(SEVEN).columns))
    small = places(records, SMALL)
    return pages.fill(
        "rivals",
        main=_table(main),
        small=_table(small),
        verdicts=_verdicts([*main, *small]),
        behind=_behind([*main, *small]),
        adapted=_adapted(places(records, PLOTTED[:3])),
        cost=_cost(records, speed),
        trainings=dart.section(trainings),
    )


def findings(place: Place) -> dict[str, Finding]:
    """How far ahead of every rival it is, where both were measured."""
    found = {r: claims.against(place.streams, OURS, r, place.columns) for r in RIVALS}
    return {rival: f for rival, f in found.items() if f.ours is not None}


def _table(among: Sequence[Place]) -> str:
    by_place = {place.name: findings(place) for place in among}
    rows = [
        [rival, *(_entry(of_place.get(rival)) for of_place in by_place.values())]
        for rival in RIVALS
        if any(rival in of_place for of_place in by_place.values())
    ]
    return markdown.table(["", *by_place], rows) if rows else "Not measured.\n"


def _entry(finding: Finding | None) -> str:
    if finding is None:
        return ""
    text = f"{finding.ours:+.1f}"
    if finding.interval is not None:
        text += f" [{finding.interval[0]:+.1f}, {finding.interval[1]:+.1f}]"
    few = "" if len(finding.parts) > len(FEW) else " ¹"
    return f"**{text}**{few}" if finding.verdict == FAILS else f"{text}{few}"


def _verdicts(among: Sequence[Place]) -> str:
    verdicts = [f.verdict for place in among for f in findings(place).values()]
    counts = {v: verdicts.count(v) for v in (HOLDS, FAILS, OPEN)}
    return markdown.paragraph(
        f"Of {len(verdicts)} comparisons, `recommended` is clearly ahead in {counts[HOLDS]} and "
        f"clearly behind in {counts[FAILS]}; in {counts[OPEN]} the interval holds zero."
    )


def _behind(among: Sequence[Place]) -> str:
    """Where the mean of a rival is higher, the largest difference first."""
    rows = [
        (f.ours, place.name, rival, f)
        for place in among
        for rival, f in findings(place).items()
        if f.ours is not None and f.ours < 0
    ]
    if not rows:
        return "Nowhere: no mean of a rival is higher.\n"
    lines = [
        [name, rival, _entry(f), f"{sum(p < 0 for p in f.parts.values())} of {len(f.parts)}"]
        for _, name, rival, f in sorted(rows, key=lambda row: row[:3])
    ]
    heads = ["stream", "rival", "difference", "corruptions where the rival is ahead"]
    return markdown.table(heads, lines, heads[2:])


def _adapted(among: Sequence[Place]) -> str:
    """What the paper's adapter adds to TENT and to each rival."""
    rows = []
    for rival in ("TENT", *RIVALS):
        row = rival + ADAPTED
        found = [claims.against(p.streams, row, rival, p.columns) for p in among]
        if any(f.ours is not None for f in found):
            rows.append([rival, *("" if f.ours is None else _entry(f) for f in found)])
    return markdown.table(["", *(p.name for p in among)], rows) if rows else "Not measured.\n"


def costs(speed: Mapping[str, Any]) -> dict[str, float]:
    """The time of a batch in forward passes, of every row that was timed."""
    timed = {name: cost["ratio"] for name, cost in speed["methods"].items()}
    found = {row: timed[name] for row, name in {**PLAIN, **RIVALS}.items() if name in timed}
    for check in speed["checks"]:
        if check["name"].startswith(COST):
            found[OURS] = check["value"]
    return found


def points(records: Sequence[Record], speed: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Cost in forward passes and mean accuracy in percent of every row, on the same streams."""
    comparison = claims.compare_tables([STREAMS], records).get(STREAMS)
    streams = {} if comparison is None else comparison.measurements
    found = {}
    for row, cost in costs(speed).items():
        accuracies = [
            [100 * m.accuracy for m in streams.get((row, c), ()) if m.stream[0] in FEW]
            for c in PLOTTED
        ]
        if all(len(of_column) >= len(FEW) for of_column in accuracies):
            found[row] = (cost, float(np.mean([np.mean(a) for a in accuracies])))
    return found


def _cost(records: Sequence[Record], speed: Mapping[str, Any]) -> str:
    rows = sorted(points(records, speed).items(), key=lambda item: -item[1][1])
    lines = [[row, f"{accuracy:.1f}", f"{cost:.2f}"] for row, (cost, accuracy) in rows]
    return markdown.table(["", "mean accuracy", "forward passes"], lines)


def label_places(marks: Sequence[tuple[float, float]], widths: Sequence[float]) -> list[Corner]:
    """Where the label of each mark stands: at a corner that meets no other mark or label.

    Args:
        marks: Where the marks are, in points of the page.
        widths: Of the labels, in points.
    """
    taken = [(x - 4, x + 4, y - 4, y + 4) for x, y in marks]
    corners = []
    for (x, y), width in zip(marks, widths, strict=True):
        boxes = {
            (side, up): (min(a, b), max(a, b), min(c, d), max(c, d))
            for side, up in itertools.product((5, -5), (2, -2))
            for a, b in [(x + side, x + side + np.sign(side) * width)]
            for c, d in [(y + up, y + up + np.sign(up) * (LABEL + 3))]
        }
        own = (x - 4, x + 4, y - 4, y + 4)
        clashes = {
            corner: sum(_meet(box, other) for other in taken if other != own)
            for corner, box in boxes.items()
        }
        corner = min(clashes, key=lambda c: clashes[c])
        corners.append(corner)
        taken.append(boxes[corner])
    return corners


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def figure(records: Sequence[Record], speed: Mapping[str, Any]) -> Any:
    """Accuracy against cost, a point per method."""
    drawing, axes = draw.canvas(1, 1, (8.0, 4.6), "Accuracy and cost, both shifts (CIFAR-10)")
    (ax,) = axes.flat
    shown = points(records, speed)
    for row, point in shown.items():
        ours = row == OURS
        ax.scatter(*point, color=draw.COLOURS[int(ours)], s=60 if ours else 30)
    ax.set_xscale("log")
    ticks = (1, 2, 3, 5, 8)
    ax.set_xticks(ticks, map(str, ticks))
    ax.minorticks_off()
    ax.set_xlabel("cost of a batch, in forward passes")
    ax.set_ylabel("mean accuracy, %")
    ax.margins(x=0.2)
    if shown:
        pixels = ax.transData.transform([*shown.values()]) * 72 / drawing.dpi
        widths = [0.6 * LABEL * len(row) for row in shown]
        places = label_places([(float(x), float(y)) for x, y in pixels], widths)
        for (row, point), (side, up) in zip(shown.items(), places, strict=True):
            style = {"fontsize": LABEL + (row == OURS), "weight": "bold" if row == OURS else None}
            where = {"ha": "left" if side > 0 else "right", "va": "bottom" if up > 0 else "top"}
            colour = draw.COLOURS[int(row == OURS)]
            offset = {"xytext": (side, up), "textcoords": "offset points"}
            ax.annotate(row, point, color=colour, **offset, **where, **style)
    return drawing
