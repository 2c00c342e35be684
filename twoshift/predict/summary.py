"""What a run has found, in short: made of the records of its parts, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from twoshift.accuracy import Expected, ExpectedAccuracy
from twoshift.accuracy.signals import signal_count
from twoshift.predict.answers import MOST

SHOWN = 5  # classes in the text
COUNTED = ("images", "errors", "compared", "changed")


def summarise(
    records: Iterable[Mapping[str, Any]],
    classes: Sequence[str],
    training: Sequence[float] | None = None,
    judge: Tensor | None = None,
) -> dict[str, Any]:
    """Add up the records of all parts.

    Args:
        records: The records, in order.
        classes: Names of the classes.
        training: Label distribution of the training images.
        judge: The fact that tells how often predictions are right.
    """
    size = len(classes)
    whole = dict.fromkeys(COUNTED, 0)
    lengths = {"counts": size, "labels": size, "signals": signal_count(size)}
    sums: dict[str, list[float]] = {name: [0] * length for name, length in lengths.items()}
    first_error, view, trace, most = None, 0, list[Any](), list[Any]()
    for record in records:
        for name in whole:
            whole[name] += record[name]
        for name, before in sums.items():
            sums[name] = [a + b for a, b in zip(before, record[name], strict=True)]
        first_error, view = first_error or record["first_error"], record["view"]
        trace += record["trace"]
        most = sorted([*most, *record["most"]], key=lambda row: (-row[0], row[1]))[:MOST]
    # a method without an estimate of the labels has its predictions
    labels = sums["labels"] if any(sums["labels"]) else sums["counts"]
    return {
        **whole,
        "first_error": first_error,
        "classes": list(classes),
        "counts": sums["counts"],
        "labels": [value / max(sum(labels), 1e-300) for value in labels],
        "training": None if training is None else list(training),
        "accuracy": _expected(sums["signals"], view, judge, size),
        "trace": trace,
        "most": most,
    }


def _expected(
    signals: Sequence[float], view: int, judge: Tensor | None, classes: int
) -> list[float] | None:
    """The accuracy that is expected of all predictions together, and its interval."""
    if judge is None:
        return None
    accuracy = ExpectedAccuracy(classes, judge)
    sums = torch.tensor(signals, dtype=torch.float64)
    accuracy.hold({"sums": sums, "view": torch.tensor(float(view))})
    expected = accuracy.read()
    return None if expected is None else list(expected)


def as_text(summary: Mapping[str, Any]) -> str:
    """The summary, a few lines."""
    read = summary["images"] - summary["errors"]
    lines = [f"images    {summary['images']:,}"]
    if summary["errors"]:
        first = summary["first_error"]
        lines.append(f"unread    {summary['errors']:,}, the first: {first}")
    training = summary["training"]
    ranked = sorted(range(len(summary["labels"])), key=lambda c: -summary["labels"][c])[:SHOWN]
    shares = []
    for c in ranked:
        was = "" if training is None else f" (training {training[c]:.0%})"
        shares.append(f"{summary['classes'][c]} {summary['labels'][c]:.0%}{was}")
    more = ", ..." if len(summary["labels"]) > SHOWN else ""
    lines.append(f"labels    {', '.join(shares)}{more}")
    if (distance := label_distance(summary)) is not None:
        lines.append(f"          {distance:.0%} of the labels would have to change")
    if summary["accuracy"] is not None:
        lines.append(f"accuracy  {Expected(*summary['accuracy'])} expected")
    if summary["compared"]:
        share = summary["changed"] / summary["compared"]
        lines.append(f"changed   {share:.1%} of predictions, against the unadapted model")
    if not read:
        lines.append("          no image could be read")
    return "\n".join(lines)


def label_distance(summary: Mapping[str, Any]) -> float | None:
    """Half of the summed differences of the labels' shares from those of the training."""
    if summary["training"] is None:
        return None
    pairs = zip(summary["labels"], summary["training"], strict=True)
    return sum(abs(a - b) for a, b in pairs) / 2
