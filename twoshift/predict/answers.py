"""From logits to rows of the table, and to what a run remembers of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twoshift.accuracy.signals import signal_count, signals_of
from twoshift.predict.inputs import Gallery
from twoshift.predict.reading import Seen
from twoshift.predict.table import Shape

MOST = 24  # images whose prediction changed most
Reals = NDArray[np.float32]


def rows_of(
    gallery: Gallery,
    seen: Seen,
    logits: Tensor | None,
    plain: Tensor | None,
    version: int,
    shape: Shape,
) -> dict[str, Any]:
    """The rows of a batch, in the order of its images; one that was not read has an error.

    Args:
        gallery: All images.
        seen: The batch.
        logits: Predictions for those that were read; None if there are none.
        plain: The same by the unadapted model.
        version: Version of the state that predicted.
        shape: What the table has.
    """
    batch = seen.batch
    count = batch.stop - batch.start
    places = np.array([p - batch.start for p in seen.positions], np.int64)
    p, best = _ranked(logits, shape)
    values: dict[str, Any] = {
        "path": [gallery.ids[i] for i in range(batch.start, batch.stop)],
        "stream": [batch.stream] * count,
        "batch": np.full(count, batch.number, np.int64),
        "state_version": np.full(count, version, np.int64),
        "error": [seen.errors.get(i) for i in range(batch.start, batch.stop)],
        "entropy": _spread(_entropy(p), places, count),
    }
    for place in range(shape.top):
        ending = "" if place == 0 else f"_{place + 1}"
        column = best[:, place]
        values[f"class{ending}"] = _texts([shape.classes[c] for c in column], places, count)
        values[f"probability{ending}"] = _spread(p[np.arange(len(p)), column], places, count)
    if shape.baseline:
        own = [] if plain is None else [shape.classes[c] for c in plain.argmax(1).tolist()]
        values["unadapted"] = _texts(own, places, count)
    if shape.probabilities:
        names = [column.name for column in shape.columns()[-len(shape.classes) :]]
        for c, name in enumerate(names):
            values[name] = _spread(p[:, c], places, count)
    return values


def _ranked(logits: Tensor | None, shape: Shape) -> tuple[Reals, NDArray[np.int64]]:
    """Probabilities, and the likeliest classes; of equally likely ones, the first."""
    if logits is None:
        return np.empty((0, len(shape.classes)), np.float32), np.empty((0, shape.top), np.int64)
    p = logits.detach().float().softmax(1).cpu().numpy()
    return p, np.argsort(-p, axis=1, kind="stable")[:, : shape.top]


def _entropy(p: Reals) -> Reals:
    return torch.special.entr(torch.from_numpy(p).double()).sum(1).float().numpy()


def _spread(values: Reals, places: NDArray[np.int64], count: int) -> Reals:
    """Values at their places, and nothing at the others."""
    spread = np.full(count, np.nan, np.float32)
    if len(values):
        spread[places] = values
    return spread


def _texts(values: Sequence[str], places: NDArray[np.int64], count: int) -> list[str | None]:
    spread: list[str | None] = [None] * count
    for place, value in zip(places.tolist() if values else (), values, strict=True):
        spread[place] = value
    return spread


@dataclass
class Record:
    """What is remembered of a part: numbers that add up.

    Attributes:
        images: Number of images.
        errors: Number of those that could not be read.
        first_error: Why the first of them could not.
        counts: Predictions of every class.
        labels: Label estimates, summed over images.
        compared: Images that the unadapted model has predicted, too.
        changed: Those of them whose class is another one.
        signals: Sums of which the expected accuracy is told.
        view: Which statistics predicted, as a position in `VIEWS`.
        trace: The label estimate and the expected accuracy, now and then.
        most: Images whose probabilities changed most: distance, position, name, both classes.
    """

    images: int = 0
    errors: int = 0
    first_error: str | None = None
    counts: list[int] = field(default_factory=list)
    labels: list[float] = field(default_factory=list)
    compared: int = 0
    changed: int = 0
    signals: list[float] = field(default_factory=list)
    view: int = 0
    trace: list[dict[str, Any]] = field(default_factory=list)
    most: list[list[Any]] = field(default_factory=list)

    @classmethod
    def of(cls, classes: int) -> Record:
        """An empty one."""
        sums = [0.0] * signal_count(classes)
        return cls(counts=[0] * classes, labels=[0.0] * classes, signals=sums)

    def count(
        self,
        gallery: Gallery,
        seen: Seen,
        logits: Tensor | None,
        plain: Tensor | None,
        threshold: float = 1.0,
        temperature: float = 1.0,
    ) -> None:
        """Count a batch.

        Args:
            gallery: All images.
            seen: The batch.
            logits: Predictions for the images that were read.
            plain: The same by the unadapted model.
            threshold: Confidence above which an image is sure.
            temperature: Of the unadapted model's calibrated probabilities.
        """
        self.images += seen.batch.stop - seen.batch.start
        self.errors += len(seen.errors)
        if seen.errors and self.first_error is None:
            self.first_error = seen.errors[min(seen.errors)]
        if logits is None:
            return
        p = logits.detach().float().softmax(1).cpu()
        found = p.argmax(1)
        counts = torch.bincount(found, minlength=len(self.counts))
        self.counts = (torch.tensor(self.counts) + counts).tolist()
        self.signals = (_exact(self.signals) + signals_of(p, threshold)).tolist()
        if plain is None:
            return
        before = (plain.detach().float().cpu() / temperature).softmax(1)
        old = before.argmax(1)
        distances = (p - before).abs().sum(1) / 2
        self.compared += len(p)
        self.changed += int((found != old).sum())
        for i in (found != old).nonzero().flatten().tolist():
            position = seen.positions[i]
            classes = [int(old[i]), int(found[i])]
            self.most.append([float(distances[i]), position, gallery.ids[position], *classes])
        self.most = sorted(self.most, key=lambda row: (-row[0], row[1]))[:MOST]

    def add_labels(self, prior: Tensor | None, images: int) -> None:
        """Add the label estimate of some images."""
        if prior is not None:
            weighted = prior.detach().double().cpu() * images
            self.labels = (_exact(self.labels) + weighted).tolist()


def _exact(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
