"""What of a data set of image files is here, and what is missing: found without opening an image.

Loaders make their sets from an `Inventory`; ``twoshift data check`` prints it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from twoshift.data._lists import class_names, read_list, reroot
from twoshift.data.base import ImageSet, ask, datasets
from twoshift.data.files import ImageFiles
from twoshift.errors import DataMissing, UnknownName
from twoshift.registry import Registry, near_miss

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")
SHOWN = 5  # missing files that are named


@dataclass(frozen=True)
class Inventory:
    """The images of one split of a data set, here or not.

    Attributes:
        name: Of the data set, with its part.
        split: ``"train"`` or ``"test"``.
        paths: Where every image is, or should be.
        labels: int64, (N,).
        classes: Names of the classes.
        missing: The images that are not here.
        problems: What else is not here: lists, folders.
        notes: What is worth knowing, but is no fault.
        source: What the labels come from, and where the images are, without the root's path.
        cure: How to make it whole.
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
        """Whether everything is here."""
        return not (self.missing or self.problems)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Listed images of every class."""
        return np.bincount(self.labels, minlength=len(self.classes))

    @property
    def found(self) -> int:
        """Images that are here."""
        return len(self.paths) - len(self.missing)

    @property
    def empty(self) -> tuple[str, ...]:
        """Classes without images."""
        return tuple(self.classes[c] for c in np.flatnonzero(self.counts == 0))

    def image_set(self, size: int, frame: int, squash: bool) -> ImageSet:
        """The images, decoded when asked for; an error where some are missing."""
        if not self.whole:
            raise self.error()
        return ImageSet(
            self.name,
            self.split,
            ImageFiles(self.paths, size, frame, squash),
            self.labels,
            self.classes,
            origin=f"{self.source}: {self.found:,} images",
        )

    def error(self) -> DataMissing:
        """What is missing, as an error."""
        told = list(self.problems)
        if self.missing and not told:
            first = ", ".join(self.missing[:SHOWN])
            told.append(f"{len(self.missing):,} of {len(self.paths):,} images, the first: {first}")
        what = f"{self.name} ({self.split}) lacks {'; lacks '.join(told)}"
        return DataMissing(what, cure=self.cure or None)


# functions take (split, root), then perhaps a part of the set, as loaders do
Entry = TypeVar("Entry", bound=Callable[..., Inventory])
inventories: Registry[Callable[..., Inventory]] = Registry("data set of files", "twoshift.data")


def take_inventory(name: str, split: str, root: Path, **settings: Any) -> Inventory:
    """The inventory of a data set by name; a part, or a place, follows a colon."""
    return ask(inventories, name, split, root, settings)


def image_files(name: str, squash: bool) -> Callable[[Entry], Entry]:
    """Decorator: make an inventory known, and under the same name the loader of its images.

    Args:
        name: Of the data set.
        squash: How the loader resizes by default, see `ImageFiles`.
    """

    def keep(entry: Entry) -> Entry:
        def loader(
            *place: Any, size: int = 224, frame: int = 256, squash: bool = squash, **part: str
        ) -> ImageSet:
            return entry(*place, **part).image_set(size, frame, squash)

        own, decoding = (inspect.signature(f).parameters.values() for f in (entry, loader))
        keywords = [p for p in decoding if p.kind is p.KEYWORD_ONLY]
        loader.__signature__ = inspect.Signature([*own, *keywords])  # type: ignore[attr-defined]
        loader.__doc__ = entry.__doc__
        datasets.register(name)(loader)
        inventories.register(name)(entry)
        return entry

    return keep


def parts_of(entry: Callable[..., Any]) -> tuple[str, ...]:
    """The parts of a set, read from its signature; none where a part is any place."""
    return get_args(get_type_hints(entry).get("part"))


def check_part(name: str, part: str, parts: Sequence[str]) -> None:
    """Refuse a part that the set does not have."""
    if part not in parts:
        raise UnknownName(f"{name} has no part {part!r}", cure=near_miss(part, parts))


@dataclass(frozen=True)
class Published:
    """A data set that is published as images here and lists there.

    Attributes:
        name: Registered name.
        folders: Names that its folder has on people's disks; below them come the images.
        lists: Name of the folder of its lists in ``lists/``; they may also lie beside the images.
        images: How to get the images.
        labels: How to get the lists.
    """

    name: str
    folders: tuple[str, ...]
    lists: str
    images: str
    labels: str

    def inventory(
        self,
        part: str,
        split: str,
        root: Path,
        file: str,
        *inner: str,
    ) -> Inventory:
        """What is here of one list.

        Args:
            part: Part of the set; empty where it has none.
            split: ``"train"`` or ``"test"``.
            root: Folder of all data, or of this set alone.
            file: Name of the list.
            inner: Names of the folder of these images in the set's folder.
        """
        homes = [root / folder for folder in self.folders] + [root]
        bases = [home / folder for home in homes for folder in inner]
        lists = [root / "lists" / self.lists / file, *(home / file for home in homes)]
        listed = next((path for path in lists if path.is_file()), None)
        problems, cures = [], []
        if not any(base.is_dir() for base in bases):
            where = ", ".join(self.folders)
            problems.append(f"its images: no folder {inner[0]!r} in {where} of {root}")
            cures.append(self.images)
        if listed is None:
            problems.append(
                f"the list {file}: it is neither in {lists[0].parent} nor with the images"
            )
            cures.append(self.labels)
        name = f"{self.name}:{part}" if part else self.name
        if listed is None:
            return Inventory(name, split, problems=tuple(problems), cure=" ".join(cures))
        listing = read_list(listed)
        paths, missing = reroot(listing.paths, bases)
        return Inventory(
            name,
            split,
            paths,
            listing.labels,
            class_names(listing),
            missing,
            tuple(problems),
            source=f"{file} of {self.lists}",
            cure=" ".join(cures) or f"Unpack the images again. {self.images}",
        )


def class_folders(
    name: str,
    split: str,
    folder: Path,
    classes: Sequence[str] | None = None,
    cure: str = "",
    all_here: bool = True,
) -> Inventory:
    """The images in the class folders of ``folder``, at any depth, in the order of their names.

    Args:
        name: Of the data set.
        split: ``"train"`` or ``"test"``.
        folder: Holds a folder per class.
        classes: Their names; by default all folders that there are.
        cure: How to make it whole.
        all_here: A class without a folder is an error, rather than an empty class.
    """
    there = folders_in(folder)
    if classes is None:
        classes = there
    paths: list[str] = []
    labels: list[int] = []
    other = 0
    for label, title in enumerate(classes):
        for parent, inside, files in os.walk(folder / title):
            inside.sort()
            for file in sorted(files):
                if file.startswith(".") or not file.lower().endswith(SUFFIXES):
                    other += 1
                    continue
                paths.append(os.path.join(parent, file))
                labels.append(label)
    absent = [title for title in classes if title not in there] if all_here else []
    problems = [f"the folder {folder / title}" for title in absent]
    if not there:
        problems = [f"class folders in {folder}"]
    elif not paths and not problems:
        problems = [f"images in the class folders of {folder}"]
    return Inventory(
        name,
        split,
        paths,
        np.array(labels, np.int64),
        tuple(classes),
        problems=tuple(problems),
        notes=(f"{other} files that are no images are left out",) if other else (),
        source=f"class folders of {folder.name}",
        cure=cure or "A data set is a folder that holds a folder of images per class.",
    )


def folders_in(folder: Path) -> list[str]:
    """Names of the visible folders in a folder; none where there is no such folder."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
