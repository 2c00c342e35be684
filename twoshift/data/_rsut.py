"""RSUT splits of any data set: a long-tailed source and a target with the opposite tail.

Reversely-unbalanced Source and Unbalanced Target, after Tan et al., "Class-imbalanced Domain
Adaptation: An Empirical Odyssey", https://arxiv.org/abs/1910.10320. The published lists of VisDA-C
have the exponential profile with ratio 100.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twoshift.data._inventory import take_inventory
from twoshift.data._lists import CATEGORIES, category_names
from twoshift.data.long_tail import ClassOrder, Profile, long_tailed_indices
from twoshift.errors import DataError
from twoshift.priors import class_order
from twoshift.registry import check_choice
from twoshift.storage import atomic_file


def rsut(
    source_labels: NDArray[np.int64],
    target_labels: NDArray[np.int64],
    ratio: float,
    seed: int = 0,
    profile: Profile = "exponential",
    order: ClassOrder = "index",
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row indices of a long-tailed source, and of a target whose head is the source's tail.

    Both are as large as their smallest classes allow, so any data set can be used.

    Args:
        source_labels: Labels of all source images.
        target_labels: Labels of all target images, which must not be source images.
        ratio: Number of images of the most frequent class over that of the rarest one, in both.
        seed: Seed of the draw.
        profile: Shape of both tails.
        order: Order of the classes from the source's head to its tail: ``"index"``, as published;
            ``"size"``, by how many more images the source has than the target, which keeps the most
            images of unbalanced sets; or a permutation.
    """
    source, target = np.bincount(source_labels), np.bincount(target_labels)
    if len(source) != len(target):
        must_be = "data sets with the same classes"
        got = f"{len(source)} and {len(target)} classes"
        raise DataError("source and target of RSUT", must_be=must_be, got=got)
    if isinstance(order, str):
        check_choice("rsut", ("index", "size"), order=order)
        surplus = (source + 1) / (target + 1)
        order = class_order(surplus).tolist() if order == "size" else range(len(source))
    source_rows = long_tailed_indices(source_labels, ratio, profile, seed, order)
    target_rows = long_tailed_indices(target_labels, ratio, profile, seed, order[::-1])
    return source_rows, target_rows


def write_rsut(
    source: str,
    target: str,
    out: Path,
    ratio: float,
    root: Path,
    *,
    seed: int = 0,
    profile: str = "exponential",
    order: str = "index",
) -> dict[Path, int]:
    """Write an RSUT split of two data sets of image files as lists, for ``list:FILE``.

    Args:
        source: Name of the data set whose training images are drawn.
        target: Name of the data set whose test images are drawn; it must have the same classes.
        out: Folder for the lists and for ``category.txt``, which names the classes.
        ratio: Number of images of the most frequent class over that of the rarest one, in both.
        root: Root folder of the data sets.
        seed: Seed of the draw.
        profile: Shape of both tails.
        order: Order of the classes, ``"index"`` or ``"size"``; see `rsut`.

    Returns:
        The number of images in each of the two lists, by path.
    """
    train, test = take_inventory(source, "train", root), take_inventory(target, "test", root)
    for inventory in (train, test):
        if not inventory.whole:
            raise inventory.error()
    if train.classes != test.classes:
        raise DataError(
            f"classes of {target}",
            must_be=f"those of {source}: {', '.join(train.classes[:5])}, ...",
            got=", ".join(test.classes[:5]),
        )
    paths = [list(map(os.path.realpath, inventory.paths)) for inventory in (train, test)]
    if set(paths[0]) & set(paths[1]):
        raise DataError(f"{source} and {target}", must_be="sets of different images")
    names = dict(enumerate(train.classes))
    if category_names(out / CATEGORIES) not in ({}, names):
        what = f"{out / CATEGORIES} names other classes than {source}"
        raise DataError(what, cure="Choose another folder: --out")
    rows = rsut(train.labels, test.labels, ratio, seed, profile, order)  # type: ignore[arg-type]
    texts = {out / CATEGORIES: _lines((name, label) for label, name in names.items())}
    sizes = {}
    for kind, inventory, files, drawn in zip(("RS", "UT"), (train, test), paths, rows, strict=True):
        file = out / f"{re.sub('[^A-Za-z0-9]+', '-', inventory.name).strip('-')}_{kind}.txt"
        texts[file] = _lines((files[i], inventory.labels[i]) for i in drawn)
        sizes[file] = len(drawn)
    for file, text in texts.items():
        with atomic_file(file) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return sizes


def _lines(entries: Iterable[tuple[str, int]]) -> str:
    """Text with a line NAME NUMBER per entry."""
    lines = [f"{name} {number}\n" for name, number in entries]
    for line in lines:
        if len(line.splitlines()) > 1 or line.encode(errors="replace").decode() != line:
            what = f"the name {line.rpartition(' ')[0]!r}"
            raise DataError(what, must_be="one line of UTF-8 to fit into a list", cure="Rename it.")
    return "".join(lines)
