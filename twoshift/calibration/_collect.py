"""One pass over labelled images: predictions, statistics of every class, facts of the input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from twoshift.data.base import ImageSet
from twoshift.data.stream import Batch, Stream
from twoshift.errors import BatchError, ModelError
from twoshift.methods._appearance import Appearances
from twoshift.methods.bn_stats import BNStats, require_plain_batch_norm
from twoshift.methods.eata import fisher_information
from twoshift.methods.matched import ClassMoments
from twoshift.methods.source import Source
from twoshift.models.norm import batch_norms
from twoshift.tensors import oddity

NUMBERS = 20_000_000  # logits to keep; of more images, a random part
LEAST = 5  # images of every class that are kept in any case
SMALLEST = 8  # side of a picture that can be corrupted
BATCH_IMAGES = 10_000  # are predicted under batch statistics, too
FISHER_IMAGES, FISHER_BYTES = 2000, 2**28  # as EATA's authors; no more than this in memory
SAMPLE_IMAGES, SAMPLE_BYTES = 2000, 2**27  # kept to be corrupted


class Rows:
    """Logits and labels, of at most about ``NUMBERS`` numbers; of more images, a random part."""

    def __init__(self, classes: int) -> None:
        self._most = max(1, NUMBERS // classes)
        self._generator = torch.Generator().manual_seed(0)
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self._rows = 0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Take in the predictions of a batch."""
        luck = torch.rand(len(labels), generator=self._generator)
        self._parts.append((logits.detach().float().cpu(), labels, luck))
        self._rows += len(labels)
        if self._rows > 2 * self._most:
            self._thin()

    def read(self) -> tuple[Tensor, Tensor]:
        """Logits and labels."""
        if self._rows > self._most:
            self._thin()
        logits, labels, _ = (torch.cat(part) for part in zip(*self._parts, strict=True))
        return logits, labels

    def _thin(self) -> None:
        """Keep the rows of least luck, so that all had the same chance, and some of each class."""
        logits, labels, luck = (torch.cat(part) for part in zip(*self._parts, strict=True))
        order = luck.argsort()
        keep = order[: self._most]
        for label in labels.unique():
            keep = torch.cat([keep, order[labels[order] == label][:LEAST]])
        keep = keep.unique()
        self._parts, self._rows = [(logits[keep], labels[keep], luck[keep])], len(keep)


class ImageSample:
    """Some images of every class as bytes, if they are pictures with pixels from 0 to 1."""

    def __init__(self, classes: int) -> None:
        self._images: list[list[Tensor]] = [[] for _ in range(classes)]
        self._fits, self._shape = True, torch.Size()

    def add(self, x: Tensor, labels: Tensor) -> None:
        """Take in a batch."""
        picture = x.dim() == 4 and x.shape[1] in (1, 3) and min(x.shape[2:]) >= SMALLEST
        same = self._shape in (torch.Size(), x.shape[1:])
        if not (picture and same and float(x.min()) >= 0 and float(x.max()) <= 1):
            self._fits = False
            self._images = [[] for _ in self._images]
        if not self._fits:
            return
        self._shape, most = x.shape[1:], min(SAMPLE_IMAGES, SAMPLE_BYTES // x[0].numel())
        most = max(2, most // len(self._images))
        for image, label in zip(x, labels.tolist(), strict=True):
            if len(self._images[label]) < most:
                self._images[label].append((image * 255).round().byte().permute(1, 2, 0).cpu())

    def read(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
        """Images (N, H, W, C) and their classes; None where they are no such pictures."""
        labels = np.repeat(np.arange(len(self._images)), [len(kept) for kept in self._images])
        if not self._fits or not all(self._images):
            return None
        images = torch.stack([image for kept in self._images for image in kept])
        return images.numpy(), labels


class Collector:
    """What is seen of a classifier on labelled images, batch by batch.

    Args:
        model: A prepared classifier; it is not changed.
        classes: Number of its classes.
        training: Whether statistics of every class and the importance of weights are wanted, too.

    Attributes:
        running: Predictions under running statistics.
        batch: Predictions under batch statistics, if there is batch normalisation.
        counts: Images of every class.
        low: Smallest pixel.
        high: Largest pixel.
        shapes: Shapes of the images.
        sample: Some of the images.
        looks: What they look like.
    """

    def __init__(self, model: nn.Module, classes: int, training: bool) -> None:
        self.running, self.counts = Rows(classes), torch.zeros(classes, dtype=torch.int64)
        self.low, self.high = float("inf"), float("-inf")
        self.shapes: set[tuple[int, ...]] = set()
        self._model, self._classes, self._source = model, classes, Source(model)
        self._by_batch = BNStats(model) if any(batch_norms(model)) else None
        self.batch = None if self._by_batch is None else Rows(classes)
        matches = training and _can_be_matched(model)
        self._moments = ClassMoments(self._source.model) if matches else None
        self._images: list[Tensor] | None = [] if training and any(batch_norms(model)) else None
        self._pairs, self._same = 0.0, 0.0
        self.sample, self.looks = ImageSample(classes), Appearances()

    def add(self, x: Tensor, labels: Any) -> None:
        """Take in a batch."""
        logits = self._source(x)
        y = check_labels(labels, len(x), self._classes)
        if self._moments is not None:
            self._moments.add(y, self._classes)
        self.running.add(logits, y)
        self.sample.add(x, y)
        self.looks.add(x)
        if self.batch is not None and self._by_batch is not None and self.images < BATCH_IMAGES:
            self.batch.add(self._by_batch(x), y)
            self._keep(x)
        here = torch.bincount(y, minlength=self._classes)
        self._pairs += len(y) * (len(y) - 1)
        self._same += float((here * (here - 1)).sum())
        self.counts += here
        self.low, self.high = min(self.low, float(x.min())), max(self.high, float(x.max()))
        self.shapes.add(tuple(x.shape[1:]))

    @property
    def images(self) -> int:
        """Number of images so far."""
        return int(self.counts.sum())

    @property
    def shuffled(self) -> bool:
        """Whether two images of a batch have the same label not much more often than any two."""
        if not self._pairs:
            return False  # one image at a time
        anywhere = float((self.counts / self.counts.sum()).square().sum())
        return self._same / self._pairs < (1 + anywhere) / 2

    def moments(self) -> dict[str, Tensor] | None:
        """Statistics of every class, once; None where batch normalisation cannot be matched."""
        return None if self._moments is None else self._moments.read()

    def fisher(self) -> dict[str, Tensor] | None:
        """EATA's Fisher information, from shuffled batches; None for a network it cannot use."""
        if not self._images or not self.shuffled:
            return None
        try:
            return fisher_information(self._model, self._images)
        except ModelError:
            return None

    def _keep(self, x: Tensor) -> None:
        if self._images is None:
            return
        images = sum(map(len, self._images))
        if images < FISHER_IMAGES and (images + len(x)) * x[0].nbytes <= FISHER_BYTES:
            self._images.append(x.detach().cpu())


def labelled(batches: Any) -> Iterator[tuple[Tensor, Any]]:
    """Pairs of images and labels from what a user may have.

    Args:
        batches: Pairs of images and labels, a `Stream`, or a set of images.
    """
    if isinstance(batches, ImageSet):
        batches = Stream(batches, batch_size=64)
    if not isinstance(batches, Iterable):
        raise BatchError("batches", must_be="pairs of images and labels", got=_kind(batches))
    for batch in batches:
        if isinstance(batch, Batch):
            yield batch.x, batch.y
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            yield batch[0], batch[1]
        else:
            raise BatchError(
                "a batch to calibrate on",
                must_be="a pair (images, labels)",
                got=_kind(batch),
                cure="Yield (x, y) for every batch: x (B, C, H, W), y (B,).",
            )


def check_labels(labels: Any, images: int, classes: int) -> Tensor:
    """Labels as integers on the CPU, or an error that says what they must be."""
    if isinstance(labels, Tensor) and (strange := oddity(labels)):
        raise BatchError("labels", must_be="class numbers", got=strange)
    try:
        y = torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise BatchError("labels", must_be="class numbers", got=_kind(labels)) from None
    if y.shape != (images,) or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        got = f"{y.dtype} {tuple(y.shape)}"
        cure = "One-hot labels: pass y.argmax(1)." if y.ndim == 2 else None
        raise BatchError("labels", must_be=f"integers of shape ({images},)", got=got, cure=cure)
    y = y.long()
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise BatchError(
            "labels",
            must_be=f"from 0 to {classes - 1}, the classes of the model",
            got=f"{int(y.min())} to {int(y.max())}",
        )
    return y


def _can_be_matched(model: nn.Module) -> bool:
    try:
        require_plain_batch_norm(model, "matched")
    except ModelError:
        return False
    return True


def _kind(value: Any) -> str:
    return type(value).__name__
