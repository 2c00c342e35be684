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
    by_class = ByClass(labels, classes)
    counts = by_class.counts
    source = priors.from_counts(np.maximum(counts, 1))
    windows = []
    for _ in range(count):
        prior = np.where(counts > 0, priors.anywhere(source, rng), 0)
        # where all of a draw falls on absent classes, the set's own shares
        prior = prior / prior.sum() if prior.sum() > 0 else counts / counts.sum()
        windows.append(by_class.draw(prior, SIZE, rng))
    return windows


class ByClass:
    """Rows of images by class, to draw some under any label distribution.

    Attributes:
        counts: Images of every class.
    """

    def __init__(self, labels: NDArray[np.int64], classes: int) -> None:
        self.counts = np.bincount(labels, minlength=classes)
        self._members = np.argsort(labels, kind="stable")
        self._first = np.cumsum(self.counts) - self.counts

    def draw(self, prior: priors.Prior, images: int, rng: np.random.Generator) -> Rows:
        """Rows of so many images, with replacement; classes without images must have no share."""
        y = rng.choice(len(self.counts), images, p=prior)
        return self._members[self._first[y] + rng.integers(self.counts[y])]


def label_shares(labels: NDArray[np.int64], classes: int) -> NDArray[np.float64]:
    """Share of every class among labels."""
    return np.bincount(labels, minlength=classes) / len(labels)
