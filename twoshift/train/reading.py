"""Images as a training reads them: in parts, and from files while the step before is computed."""

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
MOST, PIXELS = 500, 64 * 224 * 224  # images and pixels of a part that is read at once


def tensors(
    images: Images,
    parts: Sequence[Part],
    kind: str = "none",
    rng: np.random.Generator | None = None,
) -> Iterator[Tensor]:
    """The images of every part as floats; those of files are decoded ahead.

    Args:
        images: In memory or in files.
        parts: Rows of ``images``.
        kind: Augmentation, see `twoshift.train.augment.augmented`.
        rng: Its source; without one there is none.
    """

    def read(part: Part) -> Tensor:
        return to_float(images[part] if rng is None else augmented(images, part, kind, rng))

    return _made(images, read, parts)


def in_parts(count: int, images: Images) -> list[Part]:
    """Rows 0 to ``count`` in parts that a large network can read, too."""
    _, height, width, _ = images.shape
    step = max(1, min(MOST, PIXELS // (height * width)))
    return [np.arange(i, min(i + step, count)) for i in range(0, count, step)]


def pixel_statistics(images: Images) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of every channel, in [0, 1]; never all images at once."""

    def histograms(part: Part) -> NDArray[np.int64]:
        channels = np.moveaxis(images[part], -1, 0)
        return np.stack([np.bincount(c.ravel(), minlength=256) for c in channels])

    counts = np.sum([*_made(images, histograms, in_parts(len(images), images))], axis=0)
    shares, values = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
    means = shares @ values
    deviations = np.sqrt((shares * (values - means[:, None]) ** 2).sum(1))
    return means.round(4).tolist(), deviations.round(4).tolist()


def _made(images: Images, make: Callable[[Part], T], parts: Sequence[Part]) -> Iterator[T]:
    if isinstance(images, LazyImages):
        return prefetch(lambda i: make(parts[i]), len(parts))
    return map(make, parts)
