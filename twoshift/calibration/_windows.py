"""Windows of training images whose labels have shifted, to learn from how predictions follow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twoshift import priors

Rows = NDArray[np.int64]
WINDOWS, SIZE = 300, 512  # how many, and images in one; chosen, not tuned


def draw_windows(
    labels: NDArray[np.int64], classes: int, count: int = WINDOWS, *, rng: np.random.Generator
) -> list[Rows]:
    """Rows of ``count`` windows, with replacement, each under a label distribution of its own."""
    counts = np.bincount(labels, minlength=classes)
    source = priors.from_counts(np.maximum(counts, 1))
    members = np.argsort(labels, kind="stable")
    first = np.cumsum(counts) - counts
    windows = []
    for _ in range(count):
        prior = np.where(counts > 0, priors.anywhere(source, rng), 0)
        # a draw that is all on absent classes says nothing
        prior = prior / prior.sum() if prior.sum() > 0 else counts / counts.sum()
        y = rng.choice(classes, SIZE, p=prior)
        windows.append(members[first[y] + rng.integers(counts[y])])
    return windows


def label_shares(labels: NDArray[np.int64], classes: int) -> NDArray[np.float64]:
    """Share of every class."""
    return np.bincount(labels, minlength=classes) / len(labels)
