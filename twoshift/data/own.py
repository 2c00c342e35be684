"""Your own images: a folder, a list, or a file of arrays."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twoshift.data.base import ImageSet, datasets
from twoshift.data.cifar import check_split
from twoshift.data.inventory import Inventory, class_folders, folders_in, inventories
from twoshift.data.lists import class_names, read_list, reroot
from twoshift.errors import DataCorrupt, DataMissing

SPLITS = {"train": ("train",), "test": ("test", "val", "validation")}


@inventories.register("folder")
def folder_inventory(split: str, root: Path, part: str) -> Inventory:
    """A folder of class folders."""
    del root  # the place is the user's own
    check_split(split)
    name, place = f"folder:{part}", Path(part)
    inside = folders_in(place)
    if not inside or not set(inside) <= {name for names in SPLITS.values() for name in names}:
        return class_folders(name, split, place)
    titles = [title for title in SPLITS[split] if title in inside]
    if not titles:
        problem = f"a folder {SPLITS[split][0]} in {place}, which has {', '.join(inside)}"
        return Inventory(name, split, problems=(problem,))
    # classes of all splits, so that a class that one of them lacks keeps its number
    classes = sorted({title for other in inside for title in folders_in(place / other)})
    return class_folders(name, split, place / titles[0], classes, all_here=False)


@inventories.register("list")
def list_inventory(split: str, root: Path, part: str) -> Inventory:
    """A list file."""
    check_split(split)
    listing = read_list(Path(part))
    bases = [listing.file.parent, root, *(root / folder for folder in folders_in(root))]
    paths, missing = reroot(listing.paths, bases)
    return Inventory(
        f"list:{part}",
        split,
        paths,
        listing.labels,
        class_names(listing),
        missing,
        source=listing.file.name,
        cure=f"Paths start in the folder of the list, in {root}, or end as files there do.",
    )


@datasets.register("folder")
def folder(
    split: str,
    root: Path,
    part: str,
    *,
    size: int = 224,
    frame: int = 256,
    squash: bool = False,
) -> ImageSet:
    """Your images: folder:PATH, with PATH/CLASS/*.jpg, or PATH/train/CLASS and PATH/test/CLASS.

    Without train/ and test/ both splits are all images.
    """
    return folder_inventory(split, root, part).image_set(size, frame, squash)


@datasets.register("list")
def list_(
    split: str,
    root: Path,
    part: str,
    *,
    size: int = 224,
    frame: int = 256,
    squash: bool = False,
) -> ImageSet:
    """Your images: list:FILE, with lines of PATH LABEL; both splits are all of them.

    Paths start in the list's folder or in the data root; absolute ones of another machine are found
    by their tails. Names of the classes come from category.txt beside the list, or from the folders
    of the images.
    """
    return list_inventory(split, root, part).image_set(size, frame, squash)


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
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu" or labels.min() < 0:
        got = f"{labels.dtype} {labels.shape}"
        raise DataCorrupt(f"labels of {part}", must_be="a class number per image", got=got)
    numbers = range(int(labels.max()) + 1)
    classes = tuple(map(str, content.get("classes", numbers)))
    if len(classes) < len(numbers):
        raise DataCorrupt(
            f"classes of {part}", must_be=f"at least {len(numbers)} names", got=len(classes)
        )
    name = Path(part).name
    return ImageSet(f"arrays:{part}", split, images, labels.astype(np.int64), classes, origin=name)


def _read_npz(file: Path) -> dict[str, NDArray[Any]]:
    try:
        with file.open("rb") as f, np.load(f, allow_pickle=False) as content:
            return dict(content)
    except FileNotFoundError as e:
        raise DataMissing(f"{file} is not here", cure="Check the path of the arrays.") from e
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as e:
        raise DataCorrupt(
            f"{file} cannot be read: {e}", must_be="an .npz file of plain arrays, without objects"
        ) from e
