"""The registry of data sets and what every one of them yields."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from twoshift.errors import MismatchError, SettingError
from twoshift.registry import Registry, check_settings, parameters_of

T = TypeVar("T")
Rows = NDArray[np.int64] | slice


class LazyImages(ABC):
    """Images that are made when they are asked for; to a reader, an array of uint8 (N, H, W, C)."""

    dtype = np.dtype(np.uint8)
    ndim = 4

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """As of an array."""

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def __getitem__(self, rows: Rows) -> NDArray[np.uint8]:
        """The images at ``rows``, as at test time."""

    @abstractmethod
    def framed(self, rows: Rows) -> NDArray[np.uint8]:
        """The same with the frame around them that training crops are cut from."""

    @abstractmethod
    def subset(self, rows: Rows) -> Self:
        """Those at ``rows``, still not made."""


Images = NDArray[np.uint8] | LazyImages


@dataclass(frozen=True)
class ImageSet:
    """Labelled images: in memory, memory-mapped, or decoded from files when asked for.

    Attributes:
        name: Registered name of the data set.
        split: ``"train"`` or ``"test"``.
        images: uint8, (N, H, W, C), or what behaves like it.
        labels: int64, (N,).
        classes: Names of the classes.
        origin: Where the pixels come from, for results: the files' layout, or the generator.
        skipped: Unreadable images that were left out.
    """

    name: str
    split: str
    images: Images
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    origin: str = ""
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of images of every class."""
        return np.bincount(self.labels, minlength=len(self.classes))

    def subset(self, indices: NDArray[np.int64]) -> ImageSet:
        """The images at ``indices``, in that order."""
        images: Images
        if isinstance(self.images, LazyImages):
            images = self.images.subset(indices)
        else:
            images = self.images[indices]
        return replace(self, images=images, labels=self.labels[indices])

    def aligned(self, classes: Sequence[str]) -> ImageSet:
        """The same images with labels that count ``classes``, those of a trained model."""
        if self.classes == tuple(classes):
            return self
        for owner, names in ((self.name, self.classes), ("the model", tuple(classes))):
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise MismatchError(
                    f"classes of {owner}",
                    must_be="called differently, since labels are matched by names",
                    got=f"more than one {', '.join(twice[:5])}",
                )
        places = {name: place for place, name in enumerate(classes)}
        present = [self.classes[c] for c in np.flatnonzero(self.counts)]
        strange = [name for name in present if name not in places]
        if strange:
            raise MismatchError(
                f"{self.name} has {len(strange)} classes that the model was not trained on: "
                f"{', '.join(strange[:5])}",
                must_be=f"among {', '.join(list(places)[:5])}, ... ({len(places)} classes)",
                cure="Leave these images out, or train a model that knows them.",
            )
        order = np.array([places.get(name, -1) for name in self.classes], np.int64)
        return replace(self, labels=order[self.labels], classes=tuple(classes))


# loaders take (split, root), then perhaps a part of the set and settings of the decoding
datasets: Registry[Callable[..., ImageSet]] = Registry("data set", "twoshift.data")


def data_root(root: str | Path | None = None) -> Path:
    """Where data sets live: ``root``, else ``TWOSHIFT_DATA``, else the user's cache folder."""
    if root is not None:
        return Path(root)
    if from_environment := os.environ.get("TWOSHIFT_DATA"):
        return Path(from_environment)
    from platformdirs import user_cache_path

    return user_cache_path("twoshift")


def load(
    name: str, split: str = "test", root: str | Path | None = None, **decoding: Any
) -> ImageSet:
    """Load a data set by name.

    Args:
        name: Of the data set; a part of it, or a place, follows a colon: ``"pacs:sketch"``,
            ``"folder:my/images"``.
        split: ``"train"`` or ``"test"``.
        root: Folder of all data; by default `data_root`.
        decoding: Of sets of image files: ``size``, ``frame``, ``squash``.
    """
    return replace(ask(datasets, name, split, data_root(root), decoding), name=name)


def ask(
    registry: Registry[Callable[..., T]],
    name: str,
    split: str,
    root: Path,
    settings: Mapping[str, Any],
) -> T:
    """Call the entry of a data set; a part of it, or a place, follows a colon."""
    base, _, part = name.partition(":")
    entry = registry[base]
    check_settings(name, entry, settings)
    has_parts = "part" in parameters_of(entry)
    if has_parts != bool(part):
        must_be = "one of its parts: NAME:PART" if has_parts else "without a part"
        raise SettingError(f"data set {name!r}", must_be=must_be)
    return entry(split, root, **({"part": part} if part else {}), **settings)
