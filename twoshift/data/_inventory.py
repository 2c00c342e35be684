"""Which files of an image data set are on disk and which are missing, without opening an image.

Loaders build their data sets from an `Inventory`; ``twoshift data check`` prints it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from twoshift.data._lists import class_names, read_list, reroot
from twoshift.data.base import ImageSet, call_entry, datasets
from twoshift.data.files import ImageFiles
from twoshift.errors import DataMissing, UnknownName
from twoshift.registry import Registry, near_miss

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")
SHOWN = 5  # missing files that a message names


@dataclass(frozen=True)
class Inventory:
    """All images of one split of a data set, present or missing.

    Attributes:
        name: Name of the data set, with its part.
        split: ``"train"`` or ``"test"``.
        paths: Path of every image, whether it exists or not.
        labels: Class number of every image, int64 (N,).
        classes: Names of the classes, by class number.
        missing: Paths of the missing images.
        problems: Other missing things: lists and folders.
        notes: Remarks that are not problems.
        source: Origin of the labels and images, without the path of the root folder.
        cure: How to get the missing files.
    """

    name: str
    split: str
    paths: Sequence[str] = ()
    labels: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    classes: tuple[str, ...] = ()
    missing: Sequence[str] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    source: str = ""
    cure: str = ""

    @property
    def whole(self) -> bool:
        """Whether nothing is missing."""
        return not (self.missing or self.problems)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of listed images of every class, by class number."""
        return np.bincount(self.labels, minlength=len(self.classes))

    @property
    def images_on_disk(self) -> int:
        """Number of images that are not missing."""
        return len(self.paths) - len(self.missing)

    @property
    def empty(self) -> tuple[str, ...]:
        """Names of the classes without images."""
        return tuple(self.classes[c] for c in np.flatnonzero(self.counts == 0))

    def image_set(self, size: int, frame: int, squash: bool) -> ImageSet:
        """The images, decoded when they are read; an error if some are missing."""
        if not self.whole:
            raise self.error()
        images = ImageFiles(self.paths, size, frame, squash)
        origin = f"{self.source}: {self.images_on_disk:,} images"
        return ImageSet(self.name, self.split, images, self.labels, self.classes, origin)

    def error(self) -> DataMissing:
        """An error that names the missing files."""
        problems = list(self.problems)
        if self.missing and not problems:
            count = f"{len(self.missing):,} of {len(self.paths):,} images"
            problems = [f"{count}, the first: {', '.join(self.missing[:SHOWN])}"]
        what = f"{self.name} ({self.split}) lacks {'; lacks '.join(problems)}"
        return DataMissing(what, cure=self.cure or None)


# an entry takes (split, root), like a loader; some also take a part of the set
Entry = TypeVar("Entry", bound=Callable[..., Inventory])
inventories: Registry[Callable[..., Inventory]] = Registry("data set of files", "twoshift.data")


def take_inventory(name: str, split: str, root: Path, **settings: Any) -> Inventory:
    """The inventory of a data set; in ``name``, a part or path follows a colon."""
    return call_entry(inventories, name, split, root, **settings)


def image_files(name: str, squash: bool) -> Callable[[Entry], Entry]:
    """Decorator: register an inventory, and under the same name a loader of its images.

    Args:
        name: Name of the data set.
        squash: Default of the loader's setting ``squash``, see `ImageFiles`.
    """

    def register(entry: Entry) -> Entry:
        def loader(
            *args: Any, size: int = 224, frame: int = 256, squash: bool = squash, **part: str
        ) -> ImageSet:
            return entry(*args, **part).image_set(size, frame, squash)

        parameters, decoding = (inspect.signature(f).parameters.values() for f in (entry, loader))
        settings = [p for p in decoding if p.kind is p.KEYWORD_ONLY]
        signature = inspect.Signature([*parameters, *settings])
        loader.__signature__ = signature  # type: ignore[attr-defined]
        loader.__doc__ = entry.__doc__
        datasets.register(name)(loader)
        inventories.register(name)(entry)
        return entry

    return register


def parts_of(entry: Callable[..., Any]) -> tuple[str, ...]:
    """Parts of a data set, read from its signature; empty if a part may be any path."""
    return get_args(get_type_hints(entry).get("part"))


def check_part(name: str, part: str, parts: Sequence[str]) -> None:
    """Refuse a part that the data set does not have."""
    if part not in parts:
        raise UnknownName(f"{name} has no part {part!r}", cure=near_miss(part, parts))


@dataclass(frozen=True)
class Published:
    """A data set whose images and lists are published in different places.

    Attributes:
        name: Registered name of the data set.
        folders: Usual names of the data set's folder.
        lists: Folder of the lists, below ``lists/``; the lists may also lie beside the images.
        images: How to get the images.
        labels: How to get the lists.
    """

    name: str
    folders: tuple[str, ...]
    lists: str
    images: str
    labels: str

    def inventory(
        self, part: str, split: str, root: Path, file: str, *image_folders: str
    ) -> Inventory:
        """The inventory of the images in one list.

        Args:
            part: Part of the data set; empty if it has none.
            split: ``"train"`` or ``"test"``.
            root: Root folder of the data sets, or the folder of this data set.
            file: File name of the list.
            image_folders: Possible names of the images' folder inside the data set's folder.
        """
        homes = [root / folder for folder in self.folders] + [root]
        bases = [home / folder for home in homes for folder in image_folders]
        candidates = [root / "lists" / self.lists / file, *(home / file for home in homes)]
        list_file = next((path for path in candidates if path.is_file()), None)
        name = f"{self.name}:{part}" if part else self.name
        cures: dict[str, str] = {}  # by problem
        if not any(base.is_dir() for base in bases):
            missing = f"no folder {image_folders[0]!r} in {', '.join(self.folders)} of {root}"
            cures[f"its images: {missing}"] = self.images
        if list_file is None:
            missing = f"it is neither in {candidates[0].parent} nor with the images"
            cures[f"the list {file}: {missing}"] = self.labels
            return Inventory(name, split, problems=tuple(cures), cure=" ".join(cures.values()))
        cure = " ".join(cures.values()) or f"Unpack the images again. {self.images}"
        inventory = image_list(name, split, list_file, bases, cure)
        return replace(inventory, problems=tuple(cures), source=f"{file} of {self.lists}")


def image_list(name: str, split: str, file: Path, bases: Sequence[Path], cure: str) -> Inventory:
    """The inventory of the images in a list file, which are looked up in ``bases``."""
    listing = read_list(file)
    paths, missing = reroot(listing.paths, bases)
    names = class_names(listing)
    return Inventory(name, split, paths, listing.labels, names, missing, cure=cure)


def class_folders(
    name: str,
    split: str,
    folder: Path,
    classes: Sequence[str] | None = None,
    cure: str = "",
    require_all: bool = True,
) -> Inventory:
    """The inventory of a folder per class: images at any depth, in alphabetical order.

    Args:
        name: Name of the data set.
        split: ``"train"`` or ``"test"``.
        folder: Folder that contains the class folders.
        classes: Names of the class folders; by default all folders in ``folder``.
        cure: How to get the missing files.
        require_all: Whether a missing class folder is a problem, rather than an empty class.
    """
    subfolders = folders_in(folder)
    if classes is None:
        classes = subfolders
    paths: list[str] = []
    labels: list[int] = []
    other_files, links = 0, 0
    for label, title in enumerate(classes):
        for parent, children, files in os.walk(folder / title):
            children.sort()
            links += sum(os.path.islink(os.path.join(parent, child)) for child in children)
            for file in sorted(files):
                if file.startswith(".") or not file.lower().endswith(SUFFIXES):
                    other_files += 1
                    continue
                paths.append(os.path.join(parent, file))
                labels.append(label)
    required = classes if require_all else ()
    problems = [f"the folder {folder / title}" for title in required if title not in subfolders]
    if not subfolders:
        problems = [f"class folders in {folder}"]
    elif not paths and not problems:
        problems = [f"images in the class folders of {folder}"]
    notes = [f"{other_files} files that are not images are left out"] if other_files else []
    if links:  # they may lead in circles
        notes.append(f"{links} links to folders inside the class folders are not followed")
    if lost := sorted(e.name for e in entries_of(folder) if e.is_symlink() and not e.exists()):
        notes.append(f"links that lead nowhere are left out: {', '.join(lost)}")
    return Inventory(
        name,
        split,
        paths,
        np.array(labels, np.int64),
        tuple(classes),
        problems=tuple(problems),
        notes=tuple(notes),
        source=f"class folders of {folder.name}",
        cure=cure or "A data set is a folder that contains a folder of images per class.",
    )


def folders_in(folder: Path) -> list[str]:
    """Names of the visible folders in a folder; empty if it does not exist."""
    return sorted(e.name for e in entries_of(folder) if e.is_dir() and not e.name.startswith("."))


def entries_of(folder: Path) -> list[Path]:
    """What is in a folder; nothing if it does not exist."""
    return list(folder.iterdir()) if folder.is_dir() else []
