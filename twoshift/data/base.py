"""The registry of data sets, and the type that every data set is loaded as."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from twoshift.errors import MismatchError, SettingError
from twoshift.registry import Registry, check_choice, check_settings, parameters_of

SPLITS = ("train", "test")
T = TypeVar("T")
Rows = NDArray[np.int64] | slice


class LazyImages(ABC):
    """Images that are decoded when they are read; used like a uint8 array of shape (N, H, W, C)."""

    dtype = np.dtype(np.uint8)
    ndim = 4

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the array that all images would make: (N, H, W, C)."""

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def __getitem__(self, rows: Rows) -> NDArray[np.uint8]:
        """The images at ``rows``, as a model sees them at test time."""

    @abstractmethod
    def framed(self, rows: Rows) -> NDArray[np.uint8]:
        """The images at ``rows`` with the margin around them that training crops may use."""

    @abstractmethod
    def subset(self, rows: Rows) -> Self:
        """The images at ``rows``, not decoded yet."""


Images = NDArray[np.uint8] | LazyImages


@dataclass(frozen=True)
class ImageSet:
    """Labelled images: in memory, memory-mapped, or decoded from files when they are read.

    Attributes:
        name: Registered name of the data set.
        split: ``"train"`` or ``"test"``.
        images: The images, uint8 (N, H, W, C): an array or `LazyImages`.
        labels: Class number of every image, int64 (N,).
        classes: Names of the classes, by class number.
        origin: Where the pixels come from, recorded in results: the file layout or the generator.
        skipped: Number of unreadable images that were left out.
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
        """Number of images of every class, by class number."""
        return np.bincount(self.labels, minlength=len(self.classes))

    def subset(self, indices: NDArray[np.int64]) -> ImageSet:
        """The images at ``indices``, in that order."""
        images = self.images
        part = images.subset(indices) if isinstance(images, LazyImages) else images[indices]
        return replace(self, images=part, labels=self.labels[indices])

    def aligned(self, classes: Sequence[str]) -> ImageSet:
        """The same images with labels that index ``classes``, the classes of a trained model."""
        if self.classes == tuple(classes):
            return self
        for owner, names in ((self.name, self.classes), ("the model", tuple(classes))):
            if duplicates := [name for name, count in Counter(names).items() if count > 1]:
                raise MismatchError(
                    f"classes of {owner}",
                    must_be="unique, because labels are matched by class name",
                    got=f"more than one {', '.join(duplicates[:5])}",
                )
        label_of = {name: label for label, name in enumerate(classes)}
        present = [self.classes[c] for c in np.flatnonzero(self.counts)]
        if unknown := [name for name in present if name not in label_of]:
            raise MismatchError(
                f"{self.name} has {len(unknown)} classes that the model was not trained on: "
                f"{', '.join(unknown[:5])}",
                must_be=f"among {', '.join(list(label_of)[:5])}, ... ({len(label_of)} classes)",
                cure="Leave these images out, or train a model on these classes too.",
            )
        new_labels = np.array([label_of.get(name, -1) for name in self.classes], np.int64)
        return replace(self, labels=new_labels[self.labels], classes=tuple(classes))


# a loader takes (split, root); some also take a part of the set and decoding settings
datasets: Registry[Callable[..., ImageSet]] = Registry("data set", "twoshift.data")


def data_root(root: str | Path | None = None) -> Path:
    """Root folder of the data sets: ``root``, else ``TWOSHIFT_DATA``, else the user's cache."""
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
        name: Name of the data set; a part of it, or a path, follows a colon: ``"pacs:sketch"``,
            ``"folder:my/images"``.
        split: ``"train"`` or ``"test"``.
        root: Root folder of the data sets; by default `data_root`.
        decoding: Decoding settings of sets of image files: ``size``, ``frame``, ``squash``.
    """
    return replace(call_entry(datasets, name, split, data_root(root), **decoding), name=name)


def check_split(split: str) -> None:
    """Refuse a split other than train and test."""
    check_choice("a data set", SPLITS, split=split)


def call_entry(
    registry: Registry[Callable[..., T]], name: str, split: str, root: Path, **settings: Any
) -> T:
    """Call the registered function of a data set; in ``name``, a part or path follows a colon."""
    check_split(split)
    base, _, part = name.partition(":")
    entry = registry[base]
    check_settings(name, entry, settings)
    has_parts = "part" in parameters_of(entry)
    if has_parts != bool(part):
        must_be = "followed by one of its parts: NAME:PART" if has_parts else "without a part"
        raise SettingError(f"data set {name!r}", must_be=must_be)
    return entry(split, root, **({"part": part} if part else {}), **settings)
