"""A page about a run of ``twoshift predict``: labels, expected accuracy, what has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from twoshift.report.html import fill
from twoshift.report.numbers import decimal

WIDTH, HEIGHT = 640, 160  # of a plot over time
LINES = 6  # of the most frequent classes
BARS = 30  # classes with a bar


class Line(NamedTuple):
    """A line of a plot, in its coordinates."""

    name: str
    points: str


class Bar(NamedTuple):
    """A class: its share of the labels, and that of the training, both in percent."""

    name: str
    share: float
    training: float | None


class Change(NamedTuple):
    """An image whose prediction changed."""

    picture: str
    name: str
    before: str
    after: str


def render(summary: Mapping[str, Any], pictures: Sequence[str], images: str, method: str) -> str:
    """The page.

    Args:
        summary: What a run has found.
        pictures: The images that changed most, as data URLs, in the order of the summary.
        images: Where the images came from.
        method: What predicted.
    """
    trace, classes = summary["trace"], summary["classes"]
    changes = [
        Change(picture, name, classes[old], classes[new])
        for picture, (_, _, name, old, new) in zip(pictures, summary["most"], strict=True)
    ]
    return fill(
        "predictions.html",
        summary=summary,
        images=images,
        method=method,
        bars=bars(summary),
        others=max(0, len(classes) - BARS),
        labels=label_lines(trace, classes),
        accuracy=accuracy_band(trace),
        changes=changes,
        size=(WIDTH, HEIGHT),
        last=trace[-1]["image"] if trace else 0,
    )


def bars(summary: Mapping[str, Any]) -> list[Bar]:
    """The most frequent classes, by the label estimate."""
    labels, training = summary["labels"], summary["training"]
    ranked = sorted(range(len(labels)), key=lambda c: (-labels[c], c))[:BARS]
    return [
        Bar(summary["classes"][c], 100 * labels[c], None if training is None else 100 * training[c])
        for c in ranked
    ]


def label_lines(trace: Sequence[Mapping[str, Any]], classes: Sequence[str]) -> list[Line]:
    """Shares of the most frequent classes over time; none if they were not followed."""
    points = [point for point in trace if point["labels"] is not None]
    if len(points) < 2:
        return []
    mean = [
        sum(shares) / len(points) for shares in zip(*(p["labels"] for p in points), strict=True)
    ]
    ranked = sorted(range(len(classes)), key=lambda c: (-mean[c], c))[:LINES]
    top = max(point["labels"][c] for point in points for c in ranked)
    return [
        Line(classes[c], _points(points, [point["labels"][c] / top for point in points]))
        for c in ranked
    ]


def accuracy_band(trace: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """The expected accuracy over time, from 0 to 1: its line, and its interval as a polygon."""
    points = [point for point in trace if point["accuracy"] is not None]
    if len(points) < 2:
        return None
    value, low, high = (
        _points(points, [point["accuracy"][i] for point in points]) for i in range(3)
    )
    return value, f"{low} {' '.join(reversed(high.split()))}"


def _points(points: Sequence[Mapping[str, Any]], levels: Sequence[float]) -> str:
    """Coordinates of a line whose levels are from 0 to 1."""
    last = max(points[-1]["image"], 1)
    pairs = zip(points, levels, strict=True)
    return " ".join(
        f"{decimal(point['image'] / last * WIDTH)},{decimal((1 - level) * HEIGHT)}"
        for point, level in pairs
    )
