"""The facts about data sets that ``twoshift data check`` and ``twoshift data ls`` print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from twoshift.data import domainnet, imagenet, office_home, pacs, visda
from twoshift.data._inventory import SHOWN, Inventory, inventories, parts_of, take_inventory
from twoshift.data.base import SPLITS, datasets, load
from twoshift.data.files import ImageFiles, unreadable
from twoshift.errors import DataError

# listed here, because asking the registry would import torch
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
    """Check which files of a data set are present and which are missing: a row per part and split.

    Args:
        name: Name of a data set; if it has parts and none is named, all of them are checked.
        split: ``"train"`` or ``"test"``; by default both.
        root: Root folder of the data sets.
        severity: Severity of ImageNet-C.
        decode: Whether to decode every image, too.
    """
    base, _, part = name.partition(":")
    datasets[base]  # an unknown name is an error before any split is checked
    parts = parts_of(inventories[base]) if base in inventories and not part else ()
    splits = SPLITS if split is None else (split,)
    settings: dict[str, Any] = {}
    if base == "imagenet_c":
        splits, settings = splits[-1:], {"severity": severity}  # it has test images only
    for set_name in [f"{base}:{part}" for part in parts] or [name]:
        for split_name in splits:
            yield _row(set_name, split_name, root, settings, decode)


def _row(
    name: str, split: str, root: Path, settings: dict[str, Any], decode: bool
) -> dict[str, Any]:
    try:
        if name.partition(":")[0] in inventories:
            inventory = take_inventory(name, split, root, **settings)
        else:  # a set that can be loaded lacks nothing
            data = load(name, split, root)
            inventory = Inventory(name, split, (), data.labels, data.classes, source=data.origin)
    except DataError as e:
        inventory = Inventory(name, split, problems=(str(e),))
    bad = _undecodable(inventory) if decode else []
    counts = inventory.counts[inventory.counts > 0]
    return {
        "name": name,
        "split": split,
        "whole": inventory.whole and not bad,
        "source": inventory.source,
        "images": len(inventory.labels),
        "found": len(inventory.labels) - len(inventory.missing),
        "classes": len(inventory.classes),
        "largest": int(counts.max(initial=0)),
        "smallest": int(counts.min(initial=counts.max(initial=0))),
        "empty": list(inventory.empty),
        "problems": list(inventory.problems),
        "missing": list(inventory.missing[:SHOWN]),
        "undecodable": bad,
        "notes": list(inventory.notes),
        "cure": "" if inventory.whole else inventory.cure,
    }


def _undecodable(inventory: Inventory) -> list[str]:
    missing = set(inventory.missing)
    paths = [path for path in inventory.paths if path not in missing]
    return [error.what for error in unreadable(ImageFiles(paths, 8, 8, squash=True)).values()]


def states(root: Path) -> Iterator[dict[str, str]]:
    """Name, description, folder and state (whole, partial, missing, damaged) of published sets."""
    for name, entry in PUBLISHED.items():
        parts = [{"part": part} for part in parts_of(entry)] or [{}]
        row = {"name": name, "what": (entry.__doc__ or "").partition(":")[0]}
        try:
            all_inventories = [entry(split, root, **part) for part in parts for split in SPLITS]
        except DataError:
            yield {**row, "where": "", "state": "damaged"}
            continue
        present = [inventory for inventory in all_inventories if inventory.images_on_disk]
        whole = all(inventory.whole for inventory in all_inventories)
        folder = str(Path(present[0].paths[0]).parents[2]) if present else ""
        state = "whole" if whole else "partial" if present else "missing"
        yield {**row, "where": folder, "state": state}
