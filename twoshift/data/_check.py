"""What ``twoshift data check`` and ``data ls`` tell of data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from twoshift.data import domainnet, imagenet, office_home, pacs, visda
from twoshift.data._inventory import SHOWN, Inventory, inventories, parts_of, take_inventory
from twoshift.data.base import ImageSet, datasets, load
from twoshift.data.cifar import check_split
from twoshift.data.files import ImageFiles, unreadable
from twoshift.errors import DataError, UnknownName
from twoshift.registry import near_miss

SPLITS = ("train", "test")

# named here rather than asked of the registry, which would import torch
PUBLISHED: dict[str, Callable[..., Inventory]] = {
    "imagenet_lt": imagenet.inventory,
    "visda_c": visda.inventory,
    "office_home": office_home.inventory,
    "domainnet": domainnet.inventory,
    "pacs": pacs.inventory,
}


def check(
    name: str, split: str | None, root: Path, *, severity: int = 3, decode: bool = False
) -> Iterator[dict[str, Any]]:
    """What is here of a data set and what is not, split by split and part by part.

    Args:
        name: Of a data set; without the part of one that has parts, all of them.
        split: ``"train"`` or ``"test"``; by default both.
        root: Folder of all data.
        severity: Of ImageNet-C.
        decode: Open every image, too.
    """
    if split is not None:
        check_split(split)
    base, _, part = name.partition(":")
    if base not in inventories and base not in datasets:
        known = {*inventories, *datasets}
        raise UnknownName(f"unknown data set {base!r}", cure=near_miss(base, known))
    parts: tuple[str, ...] = ()
    settings: dict[str, Any] = {}
    splits = SPLITS if split is None else (split,)
    if base in inventories:
        parts = () if part else parts_of(inventories[base])
    if base == "imagenet_c":
        splits, settings = splits[-1:], {"severity": severity}  # it has test images only
    for title in [f"{base}:{part}" for part in parts] or [name]:
        for own in splits:
            yield _row(title, own, root, settings, decode)


def _row(
    name: str, split: str, root: Path, settings: dict[str, Any], decode: bool
) -> dict[str, Any]:
    try:
        if name.partition(":")[0] in inventories:
            stock = take_inventory(name, split, root, **settings)
        else:
            stock = _loaded(load(name, split, root))
    except DataError as e:
        stock = Inventory(name, split, problems=(str(e),))
    bad = _undecodable(stock) if decode else []
    used = stock.counts[stock.counts > 0]
    return {
        "name": name,
        "split": split,
        "whole": stock.whole and not bad,
        "source": stock.source,
        "images": len(stock.labels),
        "found": len(stock.labels) - len(stock.missing),
        "classes": len(stock.classes),
        "largest": int(used.max(initial=0)),
        "smallest": int(used.min(initial=used.max(initial=0))),
        "empty": list(stock.empty),
        "problems": list(stock.problems),
        "missing": list(stock.missing[:SHOWN]),
        "undecodable": bad,
        "notes": list(stock.notes),
        "cure": "" if stock.whole else stock.cure,
    }


def _loaded(data: ImageSet) -> Inventory:
    """Of a set that has no files of its own to be missing."""
    return Inventory(
        data.name, data.split, labels=data.labels, classes=data.classes, source=data.origin
    )


def _undecodable(stock: Inventory) -> list[str]:
    missing = set(stock.missing)
    here = [path for path in stock.paths if path not in missing]
    return [error.what for error in unreadable(ImageFiles(here, 8, 8, squash=True)).values()]


def states(root: Path) -> Iterator[dict[str, str]]:
    """Name, what, where and state of the published sets: whole, partial, missing or damaged."""
    for name, inventory in PUBLISHED.items():
        parts = [{"part": part} for part in parts_of(inventory)] or [{}]
        row = {"name": name, "what": (inventory.__doc__ or "").partition(":")[0]}
        try:
            stocks = [inventory(split, root, **part) for part in parts for split in SPLITS]
        except DataError:
            yield {**row, "where": "", "state": "damaged"}
            continue
        here = [stock for stock in stocks if stock.found]
        whole = all(stock.whole for stock in stocks)
        where = str(Path(here[0].paths[0]).parents[2]) if here else ""
        state = "whole" if whole else "partial" if here else "missing"
        yield {**row, "where": where, "state": state}
