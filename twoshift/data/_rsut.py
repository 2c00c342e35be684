"""RSUT splits of any data set: a long-tailed source and a target with the opposite tail.

Reversely-unbalanced Source and Unbalanced Target, after Tan et al., "Class-imbalanced Domain
Adaptation: An Empirical Odyssey", https://arxiv.org/abs/1910.10320. The published lists of VisDA-C
have the exponential profile with ratio 100.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twoshift.data._inventory import take_inventory
from twoshift.data._lists import CATEGORIES, category_names
from twoshift.data.long_tail import Order, Profile, long_tailed_indices
from twoshift.errors import DataError
from twoshift.priors import class_order
from twoshift.storage import atomic_file

Rows = NDArray[np.int64]


def rsut(
    source_labels: NDArray[np.int64],
    target_labels: NDArray[np.int64],
    ratio: float,
    seed: int = 0,
    profile: Profile = "exponential",
    order: Order = "index",
) -> tuple[Rows, Rows]:
    """Rows of a long-tailed source and of a target whose head is the source's tail.

    Both are as large as their smallest classes allow, so any set will do.

    Args:
        source_labels: Labels of all source images.
        target_labels: Labels of all target images, which must be other images.
        ratio: Images of the most frequent class over those of the rarest one, in both.
        seed: Which images are drawn.
        profile: Shape of both tails.
        order: Classes from the source's head to its tail: by ``"index"``, as published; by
            ``"size"``, those first that the source has more of than the target, which keeps the
            most images of unbalanced sets; or a permutation.
    """
    source, target = np.bincount(source_labels), np.bincount(target_labels)
    if len(source) != len(target):
        raise DataError(
            "source and target of RSUT",
            must_be="sets of the same classes",
            got=f"{len(source)} and {len(target)} classes",
        )
    ranked: Sequence[int]
    if isinstance(order, str):
        relative = (source + 1) / (target + 1)
        ranked = class_order(relative).tolist() if order == "size" else range(len(source))
    else:
        ranked = order
    return (
        long_tailed_indices(source_labels, ratio, profile, seed, ranked),
        long_tailed_indices(target_labels, ratio, profile, seed, ranked[::-1]),
    )


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
        source: Data set whose training images are drawn from.
        target: Data set whose test images are drawn from; its classes must be the source's.
        out: Folder of the lists and of ``category.txt``, which names the classes.
        ratio: Images of the most frequent class over those of the rarest one, in both.
        root: Folder of all data.
        seed: Which images are drawn.
        profile: Shape of both tails.
        order: ``"index"`` or ``"size"``.

    Returns:
        The two lists, and how many images each has.
    """
    train, test = take_inventory(source, "train", root), take_inventory(target, "test", root)
    for stock in (train, test):
        if not stock.whole:
            raise stock.error()
    if train.classes != test.classes:
        raise DataError(
            f"classes of {target}",
            must_be=f"those of {source}: {', '.join(train.classes[:5])}, ...",
            got=", ".join(test.classes[:5]),
        )
    places = [list(map(os.path.realpath, stock.paths)) for stock in (train, test)]
    if set(places[0]) & set(places[1]):
        raise DataError(f"{source} and {target}", must_be="sets of different images")
    names = dict(enumerate(train.classes))
    if category_names(out / CATEGORIES) not in ({}, names):
        raise DataError(
            f"{out / CATEGORIES} names other classes than {source}",
            cure="Choose another folder: --out",
        )
    rows = rsut(train.labels, test.labels, ratio, seed, profile, order)  # type: ignore[arg-type]
    texts = {out / CATEGORIES: _lines((name, label) for label, name in names.items())}
    written = {}
    for stock, place, chosen, kind in zip((train, test), places, rows, ("RS", "UT"), strict=True):
        file = out / f"{re.sub('[^A-Za-z0-9]+', '-', stock.name).strip('-')}_{kind}.txt"
        texts[file] = _lines((place[i], stock.labels[i]) for i in chosen)
        written[file] = len(chosen)
    for file, text in texts.items():
        with atomic_file(file) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return written


def _lines(entries: Iterable[tuple[str, int]]) -> str:
    """Lines of NAME NUMBER."""
    lines = [f"{name} {number}\n" for name, number in entries]
    for line in lines:
        if len(line.splitlines()) > 1 or line.encode(errors="replace").decode() != line:
            what = f"the name {line.rpartition(' ')[0]!r}"
            raise DataError(what, must_be="a line of UTF-8, to be listed", cure="Rename it.")
    return "".join(lines)
