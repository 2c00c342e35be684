"""List files: a path and a class number per line, wherever the paths once were.

Public lists carry the absolute paths of somebody's machine. `reroot` finds the images by the tails
of these paths; `list_counts` needs no images at all.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twoshift.errors import DataCorrupt, DataMissing

CATEGORIES = "category.txt"
MOST_CLASSES = 100_000  # a larger number is no class but a mistake


@dataclass(frozen=True)
class Listing:
    """What a list file says.

    Attributes:
        file: The list file.
        paths: One image per line, as written.
        labels: int64, (N,).
    """

    file: Path
    paths: tuple[str, ...]
    labels: NDArray[np.int64]


def read_list(file: Path) -> Listing:
    """Read a list file; blank lines are left out."""
    paths, labels = [], []
    for number, line in enumerate(_text(file).splitlines(), 1):
        if not line.strip():
            continue
        path, label = ["", *line.rsplit(maxsplit=1)][-2:]
        if not path or _class_number(label) < 0:
            raise DataCorrupt(
                f"line {number} of {file}", must_be="PATH LABEL, with a class number", got=line[:80]
            )
        paths.append(path.strip())
        labels.append(int(label))
    if not paths:
        raise DataCorrupt(f"{file} is empty", must_be="lines of PATH LABEL")
    return Listing(file, tuple(paths), np.array(labels, np.int64))


def list_counts(file: Path, classes: int = 0) -> NDArray[np.int64]:
    """Images per class of a list file, of at least ``classes`` classes; needs no images."""
    return np.bincount(read_list(file).labels, minlength=classes)


def class_names(listing: Listing) -> tuple[str, ...]:
    """Names of the classes, by number.

    They come from ``category.txt`` beside the list (lines of NAME, or NAME NUMBER), unless it
    contradicts the images' folders, as OfficeHome's does; then from these folders where every
    class has one of its own; a class that nothing names is called by its number.
    """
    folders = _folder_names(listing)
    written = category_names(listing.file.with_name(CATEGORIES))
    known = set(written.values())
    if any(name in known and written.get(c) != name for c, name in folders.items()):
        written = {}
    count = max(int(listing.labels.max()), *written, -1) + 1
    return tuple(written.get(c, folders.get(c, str(c))) for c in range(count))


def _folder_names(listing: Listing) -> dict[int, str]:
    folders: dict[int, set[str]] = defaultdict(set)
    for path, label in zip(listing.paths, listing.labels.tolist(), strict=True):
        folders[label].add(path.rpartition("/")[0].rpartition("/")[2])
    names = {label: min(own) for label, own in folders.items() if len(own) == 1}
    distinct = len(set(names.values())) == len(folders) and "" not in names.values()
    return names if distinct else {}


def category_names(file: Path) -> dict[int, str]:
    """Names by number of a ``category.txt``: lines of NAME, or NAME NUMBER; none without a file."""
    if not file.is_file():
        return {}
    lines = [line.strip() for line in _text(file).splitlines() if line.strip()]
    numbered = {_class_number(line.rpartition(" ")[2]): line.rpartition(" ")[0] for line in lines}
    # "digit 0" and "digit 1" are names: without their numbers they would be one
    distinct = len({*numbered.values()} - {""}) == len(lines)
    if distinct and sorted(numbered) == list(range(len(lines))):
        return numbered
    return dict(enumerate(lines))


def _class_number(text: str) -> int:
    """-1 where a text is none."""
    if not text.isdecimal() or len(text) > 20:  # int() refuses thousands of digits
        return -1
    return int(text) if int(text) < MOST_CLASSES else -1


def reroot(paths: Sequence[str], bases: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Where listed images are on this machine, and which of them are missing.

    One number of leading components is dropped from all paths, and what is left is looked for under
    one of ``bases``: that which finds the most images, with the longest tail. A folder is left of
    those that have one: many images are called 1.jpg. Different paths stay different. Every folder
    is read once, no file is asked for by itself.

    Args:
        paths: As listed.
        bases: Folders that may hold the images, the likeliest first.

    Returns:
        The places of all images, and the missing ones among them. Where nothing is found at all,
        the paths as listed.
    """
    names: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        folder, _, name = path.rpartition("/")
        names[folder].add(name)
    total = sum(map(len, names.values()))
    entries = cache(_entries)
    best, place = 0, (Path(), 0)
    for drop in range(max(1, min(_depth(folder) for folder in names))):
        tails = _merge(names, drop)
        if sum(map(len, tails.values())) < total:  # two images would become one
            continue
        for base in bases:
            hits = sum(len(own & entries(base / tail)) for tail, own in tails.items())
            if hits > best:
                best, place = hits, (base, drop)
        if best == total:
            break
    if not best:
        return list(paths), list(paths)
    base, drop = place
    folders = {folder: base / _tail(folder, drop) for folder in names}
    there = {folder: entries(target) for folder, target in folders.items()}
    placed, missing = [], []
    for path in paths:
        folder, _, name = path.rpartition("/")
        placed.append(os.path.join(folders[folder], name))
        if name not in there[folder]:
            missing.append(placed[-1])
    return placed, missing


def _depth(folder: str) -> int:
    return folder.count("/") + 1 if folder else 0


def _tail(folder: str, drop: int) -> str:
    # the first component of an absolute path is empty: dropping none of it leaves it absolute
    tail = "/".join(folder.split("/")[drop:])
    return tail.lstrip("/") if drop else tail


def _merge(names: dict[str, set[str]], drop: int) -> dict[str, set[str]]:
    merged: dict[str, set[str]] = defaultdict(set)
    for folder, own in names.items():
        merged[_tail(folder, drop)] |= own
    return merged


def _entries(folder: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return frozenset()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError as e:
        raise DataMissing(f"{file} is not here", cure="Check the path of the list.") from e
    except (OSError, UnicodeDecodeError) as e:
        raise DataCorrupt(f"{file} cannot be read as a list: {e}") from e
