"""List files: the path and class number of one image per line.

Published lists contain absolute paths of their authors' machines. `reroot` finds the images by the
last components of these paths; `list_counts` needs no images at all.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twoshift.errors import DataCorrupt, DataMissing

CATEGORIES = "category.txt"
MOST_CLASSES = 100_000  # a larger class number must be a mistake


@dataclass(frozen=True)
class Listing:
    """The content of a list file.

    Attributes:
        file: Path of the list file.
        paths: Paths of the images, as written in the list.
        labels: Class number of every image, int64 (N,).
    """

    file: Path
    paths: tuple[str, ...]
    labels: NDArray[np.int64]


def read_list(file: Path) -> Listing:
    """Read a list file; blank lines are skipped."""
    paths, labels = [], []
    for number, line in enumerate(text_of(file).splitlines(), 1):
        if not line.strip():
            continue
        path, label = ["", *line.rsplit(maxsplit=1)][-2:]
        if not path or _class_number(label) < 0:
            raise DataCorrupt(
                f"line {number} of {file}", must_be="PATH CLASS_NUMBER", got=line[:80]
            )
        paths.append(path.strip())
        labels.append(int(label))
    if not paths:
        raise DataCorrupt(f"{file} is empty", must_be="lines of PATH CLASS_NUMBER")
    return Listing(file, tuple(paths), np.array(labels, np.int64))


def list_counts(file: Path, classes: int = 0) -> NDArray[np.int64]:
    """Number of listed images of every class, for at least ``classes`` classes."""
    return np.bincount(read_list(file).labels, minlength=classes)


def class_names(listing: Listing) -> tuple[str, ...]:
    """Names of the classes, by class number.

    They come from ``category.txt`` beside the list (lines of NAME, or NAME NUMBER), unless it
    contradicts the folders of the images, as OfficeHome's does; otherwise from these folders, if
    every class has a folder of its own. A class without a name is named by its number.
    """
    folder_names = _folder_names(listing)
    names = category_names(listing.file.with_name(CATEGORIES))
    known = set(names.values())
    if any(name in known and names.get(c) != name for c, name in folder_names.items()):
        names = {}
    count = max(int(listing.labels.max()), *names, -1) + 1
    return tuple(names.get(c, folder_names.get(c, str(c))) for c in range(count))


def _folder_names(listing: Listing) -> dict[int, str]:
    """Folder of every class, by class number; empty unless each class has its own folder."""
    folders: dict[int, set[str]] = defaultdict(set)
    for path, label in zip(listing.paths, listing.labels.tolist(), strict=True):
        folders[label].add(path.rpartition("/")[0].rpartition("/")[2])
    names = {label: min(group) for label, group in folders.items() if len(group) == 1}
    distinct = len(set(names.values())) == len(folders) and "" not in names.values()
    return names if distinct else {}


def category_names(file: Path) -> dict[int, str]:
    """Class names by number from lines of NAME, or NAME NUMBER; empty if there is no such file."""
    if not file.is_file():
        return {}
    lines = [line.strip() for line in text_of(file).splitlines() if line.strip()]
    numbered = {_class_number(line.rpartition(" ")[2]): line.rpartition(" ")[0] for line in lines}
    # "digit 0" and "digit 1" are whole names: without the numbers they would be the same
    distinct = len({*numbered.values()} - {""}) == len(lines)
    if distinct and sorted(numbered) == list(range(len(lines))):
        return numbered
    return dict(enumerate(lines))


def _class_number(text: str) -> int:
    """The class number that ``text`` spells, or -1 if it spells none."""
    if not text.isdecimal() or len(text) > 20:  # int() refuses thousands of digits
        return -1
    return int(text) if int(text) < MOST_CLASSES else -1


def reroot(paths: Sequence[str], bases: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Find listed images on this machine, and report which of them are missing.

    The same number of leading components is dropped from all paths, and the remaining tails are
    looked up in one of ``bases``. The number and the base that find the most images win; among
    equals, the longest tail. A path with a folder keeps at least one, because many images are
    called 1.jpg, and different paths stay different. Every folder is listed once; files are not
    looked up one by one.

    Args:
        paths: Paths of the images, as written in the list.
        bases: Folders that may contain the images, the likeliest first.

    Returns:
        The paths of all images on this machine, and of these the missing ones. If no image is found
        at all, both are the paths as written.
    """
    names: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        folder, _, name = path.rpartition("/")
        names[folder].add(name)
    total = sum(map(len, names.values()))
    entries = cache(_entries)
    most_hits, best = 0, (Path(), 0)
    for drop in range(max(1, min(folder.count("/") + bool(folder) for folder in names))):
        tails: dict[str, set[str]] = defaultdict(set)  # folders with the same tail are merged
        for folder, files in names.items():
            tails[_tail(folder, drop)] |= files
        if sum(map(len, tails.values())) < total:  # two paths would become the same
            continue
        for base in bases:
            hits = sum(len(files & entries(base / tail)) for tail, files in tails.items())
            if hits > most_hits:
                most_hits, best = hits, (base, drop)
        if most_hits == total:
            break
    if not most_hits:
        return list(paths), list(paths)
    base, drop = best
    folders = {folder: base / _tail(folder, drop) for folder in names}
    new_paths, missing = [], []
    for path in paths:
        folder, _, name = path.rpartition("/")
        new_paths.append(os.path.join(folders[folder], name))
        if name not in entries(folders[folder]):
            missing.append(new_paths[-1])
    return new_paths, missing


def missing_files(paths: Iterable[Path]) -> list[Path]:
    """The paths that do not exist; every folder is listed once instead of asking for each file."""
    entries = cache(_entries)
    return [path for path in paths if path.name not in entries(path.parent)]


def _tail(folder: str, drop: int) -> str:
    # the first component of an absolute path is empty, so with drop 0 it stays absolute
    tail = "/".join(folder.split("/")[drop:])
    return tail.lstrip("/") if drop else tail


def _entries(folder: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return frozenset()


def text_of(file: Path) -> str:
    """The text of a list file."""
    if file.exists() and not file.is_file():  # opening a pipe would wait for ever
        raise DataCorrupt(f"{file} cannot be read as a list", must_be="a file")
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError as e:
        raise DataMissing(f"{file} does not exist", cure="Check the path of the list.") from e
    except (OSError, UnicodeDecodeError) as e:
        raise DataCorrupt(f"{file} cannot be read as a list: {e}") from e
