"""Read training images in parts; files are decoded ahead, while the previous part is in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from twoshift.data.base import Images, LazyImages
from twoshift.data.stream import prefetch, to_float
from twoshift.train.augment import augmented

T = TypeVar("T")
Part = NDArray[np.int64]
MAX_IMAGES, MAX_PIXELS = 500, 64 * 224 * 224  # of a part


def tensors(
    images: Images,
    parts: Sequence[Part],
    kind: str = "none",
    rng: np.random.Generator | None = None,
) -> Iterator[Tensor]:
    """The images of every part as floats; those in files are decoded ahead.

    Args:
        images: Images in memory or in files.
        parts: Rows of ``images`` in every part.
        kind: Kind of augmentation, see `twoshift.train.augment.augmented`.
        rng: Random generator of the augmentation; None turns it off.
    """

    def read(part: Part) -> Tensor:
        return to_float(images[part] if rng is None else augmented(images, part, kind, rng))

    return _read_parts(images, read, parts)


def in_parts(count: int, images: Images) -> list[Part]:
    """The first ``count`` rows in parts that are small enough for a large network."""
    _, height, width, _ = images.shape
    size = max(1, min(MAX_IMAGES, MAX_PIXELS // (height * width)))
    return [np.arange(i, min(i + size, count)) for i in range(0, count, size)]


def pixel_statistics(images: Images) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of every channel, in [0, 1]; reads the images in parts."""

    def histograms(part: Part) -> NDArray[np.int64]:
        channels = np.moveaxis(images[part], -1, 0)
        return np.stack([np.bincount(c.ravel(), minlength=256) for c in channels])

    counts = np.sum([*_read_parts(images, histograms, in_parts(len(images), images))], axis=0)
    shares, values = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
    means = shares @ values
    deviations = np.sqrt((shares * (values - means[:, None]) ** 2).sum(1))
    return means.round(4).tolist(), deviations.round(4).tolist()


def _read_parts(images: Images, read: Callable[[Part], T], parts: Sequence[Part]) -> Iterator[T]:
    """``read`` of every part; images in files are read ahead."""
    if isinstance(images, LazyImages):
        return prefetch(lambda i: read(parts[i]), len(parts))
    return map(read, parts)
