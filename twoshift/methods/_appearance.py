"""What images look like: whether one is new, and whether they suddenly look different.

What is known of a group of images is its *summary*, (3, 3): the number of new images in the first
row, then mean and variance of what each image looks like. Labels matter little for that, so a
change of the summary is a change of the images. A dozen numbers: numpy is quicker than torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.linalg import vector_norm

from twoshift.errors import SettingError

Array = NDArray[np.float64]
Appearance = tuple[tuple[float, ...], ...]  # what is known of many images, see `Appearances.read`

BLOCK = 32.0  # new images that are compared with those before
KINDS = 3
FAINTEST = 1e-3  # contrast and detail below it look the same
NARROWEST = 1e-4  # variance of what images look like: identical ones differ from everything else
NEW = 0.05  # an image that looks so different from the one before is wholly new
BRIGHTEST = 1e6  # far beyond any picture: what overflows must not spread to later images
ROUNDING = 1e-5  # differences that come from the order in which pixels are added up


def appearance(x: Tensor) -> Array:
    """Brightness, contrast and detail of every image, (B, 3).

    Brightness is the mean of the pixels, contrast the logarithm of their standard deviation, and
    detail that of the mean step from a pixel to the next.
    """
    pixels = x.detach().float()
    pixels = pixels.flatten(2) if x.dim() > 2 else pixels[:, None]
    brightness, each = pixels.mean((1, 2)), pixels[0].numel()
    spread = vector_norm(pixels - brightness[:, None, None], dim=(1, 2))
    steps = vector_norm(pixels.diff(dim=2), 1, dim=(1, 2))
    seen = torch.stack([brightness, spread, steps], 1).cpu().numpy().astype(np.float64)
    seen /= 1.0, each**0.5, each
    seen = np.nan_to_num(seen, nan=BRIGHTEST).clip(-BRIGHTEST, BRIGHTEST)
    seen[:, 1:] = np.log(np.maximum(seen[:, 1:], FAINTEST))
    return seen


def novelty(seen: Array, last: Array | None) -> Array:
    """How new every image is, from 0 to 1: one that looks like the image before it is not, (B,).

    Args:
        seen: What the images look like, (B, 3).
        last: What the image before them looks like, (3,); None if there is none.
    """
    before = seen[:1] + 2 * NEW if last is None else last[None]
    steps = np.abs(seen - np.concatenate([before, seen[:-1]])).max(1) - ROUNDING
    return np.minimum(np.maximum(steps, 0) / NEW, 1)


def new_images(seen: Array, last: Array | None) -> float:
    """How many of the images are new: one that looks like the image before it hardly counts."""
    return float(novelty(seen, last).sum())


def summary(seen: Array, images: float) -> Array:
    """The summary of a batch.

    Args:
        seen: What the images look like, (B, 3).
        images: How many of them are new.
    """
    mean = seen.sum(0) / len(seen)
    return np.stack([np.full(KINDS, images), mean, np.square(seen - mean).sum(0) / len(seen)])


def pooled(first: Array, second: Array) -> Array:
    """The summary of two groups together; of no images, it is that of the second."""
    images = first[0, 0] + second[0, 0]
    step = second[0, 0] / images if images > 0 else 1.0
    change = second[1] - first[1]
    both = first + step * (second - first)
    both[0] = images
    both[2] += step * (1 - step) * np.square(change)
    return both


def distance(usual: Array, recent: Array) -> float:
    """How far the mean of the recent images is from that of the usual ones.

    A mean square over the kinds of appearance, each in standard deviations of a single image.
    """
    change = recent[1] - usual[1]
    return float((np.square(change) / np.maximum(usual[2], NARROWEST)).sum() / KINDS)


class Appearances:
    """What a number of images look like together, part by part: for a calibration."""

    def __init__(self) -> None:
        self._count, self._sums = 0, np.zeros((2, KINDS))
        self._low, self._high = np.full(KINDS, np.inf), np.full(KINDS, -np.inf)

    def add(self, x: Tensor) -> None:
        """Take in a batch."""
        seen = appearance(x)
        self._count += len(seen)
        self._sums += seen.sum(0), np.square(seen).sum(0)
        self._low, self._high = (
            np.minimum(self._low, seen.min(0)),
            np.maximum(self._high, seen.max(0)),
        )

    def read(self) -> Appearance:
        """Smallest, largest, mean and variance of brightness, contrast and detail."""
        mean = self._sums[0] / self._count
        variance = np.maximum(self._sums[1] / self._count - np.square(mean), NARROWEST)
        return checked_appearance([self._low, self._high, mean, variance])


def checked_appearance(rows: Sequence[ArrayLike]) -> Appearance:
    """What `Appearances` read, from a card; or why it cannot be that."""
    values = np.array(rows, np.float64)
    if values.shape != (4, KINDS) or not np.isfinite(values).all() or (values[3] <= 0).any():
        must_be = f"four rows of {KINDS} finite numbers, variances above 0"
        raise SettingError("appearance of images", must_be=must_be, got=f"{values.shape}")
    return tuple(tuple(row) for row in values.tolist())
