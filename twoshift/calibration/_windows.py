"""Windows of training images with shifted labels, to learn how predictions follow the labels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twoshift import priors

Rows = NDArray[np.int64]
WINDOWS, SIZE = 300, 512  # number of windows, and images in each; chosen, not tuned


def draw_windows(
    labels: NDArray[np.int64], classes: int, count: int = WINDOWS, *, rng: np.random.Generator
) -> list[Rows]:
    """Rows of ``count`` windows, drawn with replacement, each under its own label distribution."""
    counts = np.bincount(labels, minlength=classes)
    source = priors.from_counts(np.maximum(counts, 1))
    members = np.argsort(labels, kind="stable")
    first = np.cumsum(counts) - counts
    windows = []
    for _ in range(count):
        prior = np.where(counts > 0, priors.anywhere(source, rng), 0)
        # where all of a draw falls on absent classes, the set's own shares
        prior = prior / prior.sum() if prior.sum() > 0 else counts / counts.sum()
        y = rng.choice(classes, SIZE, p=prior)
        windows.append(members[first[y] + rng.integers(counts[y])])
    return windows


def label_shares(labels: NDArray[np.int64], classes: int) -> NDArray[np.float64]:
    """Share of every class among labels."""
    return np.bincount(labels, minlength=classes) / len(labels)
