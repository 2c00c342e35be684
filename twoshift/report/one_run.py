"""The figures of one run as text: what was measured, beside the unadapted model, and a legend."""

from __future__ import annotations

from typing import NamedTuple

from twoshift.bench.cell import CLEAN, Cell
from twoshift.bench.result import Result


class Figure(NamedTuple):
    """A figure that is shown.

    Attributes:
        meaning: One line of the legend.
        scale: Factor for showing; 100 for percent.
        digits: Decimals.
    """

    meaning: str
    scale: float = 100
    digits: int = 1


FIGURES = {
    "accuracy": Figure("% of the images that are classified right"),
    "balanced_accuracy": Figure("the same by class, averaged: every class counts alike, %"),
    "head_recall": Figure("the same, for the third of classes most frequent in training"),
    "medium_recall": Figure("the same, for the third in between"),
    "tail_recall": Figure("the same, for the third rarest in training"),
    "ece": Figure("mean gap between confidence and accuracy, points; 0 is best"),
    "nll": Figure("mean -log probability of the true class; lower is better", 1, 3),
    "prior_l1": Figure("error of the label estimate at the end, 0 (none) to 2", 1, 3),
    "s_error_final": Figure("its direction: above 0, too much weight on frequent classes", 1, 3),
    "ms_per_batch_p50": Figure("median time per batch, ms", 1, 1),
}
LEGEND = "\n".join(
    [
        *(f"{name:18s} {figure.meaning}" for name, figure in FIGURES.items()),
        f"{'pixels':18s} where the images of the stream come from",
        f"{'unadapted':18s} the source model as it is, on the same stream",
        f"{'difference':18s} with minus without adaptation; of %, in points",
    ]
)


def as_text(result: Result, unadapted: Result | None = None) -> str:
    """What a run measured, one figure per line.

    Args:
        result: The run.
        unadapted: The source model on the same stream, shown beside.
    """
    lines = [_title(result.cell)]
    if unadapted is not None:
        lines.append(f"{'':20s} {'adapted':>10s} {'unadapted':>10s} {'difference':>11s}")
    for name, figure in FIGURES.items():
        ours = result.metrics[name]
        if ours is None:
            continue
        line = f"  {name:18s} {_number(ours, figure)}"
        without = None if unadapted is None else unadapted.metrics[name]
        if without is not None:
            line += f" {_number(without, figure)} {_number(ours - without, figure, sign='+'):>11s}"
        lines.append(line)
    lines.append(f"  {'pixels':18s} {result.facts['pixels']}")
    if result.facts["skipped_images"]:
        lines.append(f"  {'skipped images':18s} {result.facts['skipped_images']}")
    return "\n".join(lines)


def _title(cell: Cell) -> str:
    adapter = "" if cell.adapter is None else f" + {cell.adapter} adapter"
    strength = "" if cell.corruption == CLEAN else f"-{cell.severity}"
    facts = [f"{cell.method}{adapter}", f"{cell.corruption}{strength}", cell.labels, cell.arrival]
    return " | ".join([*(fact for fact in facts if fact), f"seed {cell.seed}"])


def _number(value: float, figure: Figure, sign: str = "") -> str:
    return f"{value * figure.scale:{sign}10.{figure.digits}f}"
