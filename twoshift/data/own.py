"""Your own images: a folder, a list, or a file of arrays."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twoshift.data._inventory import Inventory, class_folders, folders_in, image_files
from twoshift.data._lists import MOST_CLASSES, class_names, read_list, reroot
from twoshift.data.base import ImageSet, datasets
from twoshift.data.cifar import check_split
from twoshift.errors import DataCorrupt, DataMissing

SPLITS = {"train": ("train",), "test": ("test", "val", "validation")}


@image_files("folder", squash=False)
def folder(split: str, root: Path, part: str) -> Inventory:
    """Your images: folder:PATH, with PATH/CLASS/*.jpg, or PATH/train/CLASS and PATH/test/CLASS.

    Without train/ and test/ both splits are all images.
    """
    del root  # the place is the user's own
    check_split(split)
    name, place = f"folder:{part}", Path(part)
    inside = folders_in(place)
    splits = {x: folders_in(place / x) for x in sum(SPLITS.values(), ()) if x in inside}
    others = [title for title in inside if title not in splits]
    full = [title for title, classes in splits.items() if classes]
    both = "train" in full and len(full) > 1  # then the others are no classes
    if not splits or (others and not both):
        return class_folders(name, split, place)
    titles = [title for title in SPLITS[split] if title in splits]
    if not titles:
        problem = f"a folder {SPLITS[split][0]} in {place}, which has {', '.join(inside)}"
        return Inventory(name, split, problems=(problem,))
    # classes of all splits, so that a class that one of them lacks keeps its number
    classes = sorted(set().union(*splits.values()))
    stock = class_folders(name, split, place / titles[0], classes, all_here=False)
    note = (f"left out, beside the splits: {', '.join(others)}",) if others else ()
    return replace(stock, notes=stock.notes + note)


@image_files("list", squash=False)
def list_(split: str, root: Path, part: str) -> Inventory:
    """Your images: list:FILE, with lines of PATH LABEL; both splits are all of them.

    Paths start in the list's folder or in the data root; absolute ones of another machine are found
    by their tails, of a folder and the file at least. Names of the classes come from category.txt
    beside the list, or from the folders of the images.
    """
    check_split(split)
    listing = read_list(Path(part))
    bases = [listing.file.parent, root, *(root / folder for folder in folders_in(root))]
    paths, missing = reroot(listing.paths, bases)
    home = os.path.commonpath({os.path.abspath(os.path.dirname(path)) for path in paths})
    return Inventory(
        f"list:{part}",
        split,
        paths,
        listing.labels,
        class_names(listing),
        missing,
        source=f"{listing.file.name}, images in {Path(*Path(home).parts[-2:])}",
        cure=f"Paths start in the folder of the list, in {root}, or end as files there do.",
    )


@datasets.register("arrays")
def arrays(split: str, root: Path, part: str) -> ImageSet:
    """Your images: arrays:FILE.npz, with images (N, H, W, C) and labels, or train_images and so on.

    Images are uint8, labels whole numbers, ``classes`` (optional) their names.
    """
    del root
    check_split(split)
    content = _read_npz(Path(part))
    prefix = f"{split}_" if f"{split}_images" in content else ""
    try:
        images, labels = content[f"{prefix}images"], content[f"{prefix}labels"]
    except KeyError as e:
        raise DataCorrupt(
            f"{part} has no array {e}",
            must_be="images and labels, or train_images, train_labels, test_images, test_labels",
            got=", ".join(content) or "nothing",
        ) from e
    if images.ndim == 3:
        images = images[..., None]  # grey
    if images.dtype != np.uint8 or images.ndim != 4 or not len(images):
        got = f"{images.dtype} {images.shape}"
        raise DataCorrupt(f"images of {part}", must_be="uint8 (N, H, W, C)", got=got)
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        got = f"{labels.dtype} {labels.shape}"
        raise DataCorrupt(f"labels of {part}", must_be="a class number per image", got=got)
    least, most = int(labels.min()), int(labels.max())
    if least < 0 or most >= MOST_CLASSES:
        must_be, got = f"0 to {MOST_CLASSES - 1:,}", f"{least} to {most}"
        raise DataCorrupt(f"labels of {part}", must_be=must_be, got=got)
    names = content.get("classes", np.arange(most + 1))
    if names.ndim != 1 or len(names) <= most:
        must_be, got = f"at least {most + 1} names", f"an array {names.shape}"
        raise DataCorrupt(f"classes of {part}", must_be=must_be, got=got)
    return ImageSet(
        f"arrays:{part}",
        split,
        images,
        labels.astype(np.int64),
        classes=tuple(map(str, names)),
        origin=Path(part).name,
    )


def _read_npz(file: Path) -> dict[str, NDArray[Any]]:
    try:
        with file.open("rb") as f, np.load(f, allow_pickle=False) as content:
            return dict(content)
    except FileNotFoundError as e:
        raise DataMissing(f"{file} is not here", cure="Check the path of the arrays.") from e
    except Exception as e:  # damaged archives make zipfile and zlib raise nearly anything
        raise DataCorrupt(
            f"{file} cannot be read: {e}", must_be="an .npz file of plain arrays, without objects"
        ) from e
