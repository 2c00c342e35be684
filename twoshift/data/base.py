"""The registry of data sets and what every one of them yields."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twoshift.registry import Registry


@dataclass(frozen=True)
class ImageSet:
    """Labelled images in memory (or memory-mapped).

    Attributes:
        name: Registered name of the data set.
        split: ``"train"`` or ``"test"``.
        images: uint8, (N, H, W, C).
        labels: int64, (N,).
        classes: Names of the classes.
        origin: Where the pixels come from, for results: the files' layout, or the generator.
    """

    name: str
    split: str
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    origin: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of images of every class."""
        return np.bincount(self.labels, minlength=len(self.classes))

    def subset(self, indices: NDArray[np.int64]) -> ImageSet:
        """The images at ``indices``, in that order."""
        return replace(self, images=self.images[indices], labels=self.labels[indices])


datasets: Registry[Callable[[str, Path], ImageSet]] = Registry("data set", "twoshift.data")


def data_root(root: str | Path | None = None) -> Path:
    """Where data sets live: ``root``, else ``TWOSHIFT_DATA``, else the user's cache folder."""
    if root is not None:
        return Path(root)
    if from_environment := os.environ.get("TWOSHIFT_DATA"):
        return Path(from_environment)
    from platformdirs import user_cache_path

    return user_cache_path("twoshift")


def load(name: str, split: str = "test", root: str | Path | None = None) -> ImageSet:
    """Load a data set by name."""
    return datasets[name](split, data_root(root))
