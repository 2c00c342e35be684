"""Augmentation of small images, a whole batch at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PADDING = 4


def augment(images: NDArray[np.uint8], kind: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random crops after zero padding and, for ``crop_flip``, mirror images half of the time.

    Args:
        images: (B, H, W, C).
        kind: ``"crop_flip"``, ``"crop"`` or ``"none"``.
        rng: Source of the offsets.
    """
    if kind == "none":
        return images
    count, height, width, _ = images.shape
    edges = ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0))
    padded = np.pad(images, edges)
    top, left = rng.integers(0, 2 * PADDING + 1, (2, count))
    rows = top[:, None] + np.arange(height)
    columns = left[:, None] + np.arange(width)
    if kind == "crop_flip":
        mirrored = rng.random(count) < 0.5
        columns[mirrored] = columns[mirrored, ::-1]
    return padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
