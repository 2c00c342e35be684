"""Your own images: a folder, a list, or a file of arrays."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twoshift.data._inventory import Inventory, class_folders, folders_in, image_files, image_list
from twoshift.data._lists import MOST_CLASSES
from twoshift.data.base import ImageSet, datasets
from twoshift.data.files import free_memory
from twoshift.errors import DataCorrupt, DataMissing

SPLIT_NAMES = {"train": ("train",), "test": ("test", "val", "validation")}


@image_files("folder", squash=False)
def folder(split: str, root: Path, part: str) -> Inventory:
    """Your images: folder:PATH, with PATH/CLASS/*.jpg, or PATH/train/CLASS and PATH/test/CLASS.

    Without train/ and test/, both splits contain all images.
    """
    name, path = f"folder:{part}", Path(part)
    subfolders = folders_in(path)
    splits = {x: folders_in(path / x) for x in sum(SPLIT_NAMES.values(), ()) if x in subfolders}
    others = [folder for folder in subfolders if folder not in splits]
    filled = [title for title, classes in splits.items() if classes]
    has_both = "train" in filled and len(filled) > 1  # then the other folders are not classes
    if not splits or (others and not has_both):
        return class_folders(name, split, path)
    title = next((title for title in SPLIT_NAMES[split] if title in splits), None)
    if title is None:
        content = ", ".join(subfolders)
        problem = f"a folder {SPLIT_NAMES[split][0]} in {path}, which contains {content}"
        return Inventory(name, split, problems=(problem,))
    # the classes of all splits, so that class numbers agree if one split lacks a class
    classes = sorted(set().union(*splits.values()))
    inventory = class_folders(name, split, path / title, classes, require_all=False)
    note = (f"folders beside the splits are left out: {', '.join(others)}",) if others else ()
    return replace(inventory, notes=inventory.notes + note)


@image_files("list", squash=False)
def list_(split: str, root: Path, part: str) -> Inventory:
    """Your images: list:FILE, with lines of PATH LABEL; both splits contain all images.

    Paths are relative to the list's folder or the data root. Images listed with absolute paths of
    another machine are found by the ends of these paths: at least a folder and the file name. Class
    names come from category.txt beside the list, or from the folders of the images.
    """
    file = Path(part)
    bases = [file.parent, root, *(root / folder for folder in folders_in(root))]
    cure = f"Paths must start in the folder of the list or in {root}, or end like files there."
    inventory = image_list(f"list:{part}", split, file, bases, cure)
    home = os.path.commonpath({os.path.abspath(os.path.dirname(path)) for path in inventory.paths})
    source = f"{file.name}, images in {Path(*Path(home).parts[-2:])}"
    return replace(inventory, source=source)


@datasets.register("arrays")
def arrays(split: str, root: Path, part: str) -> ImageSet:
    """Your images: arrays:FILE.npz, with images (N, H, W, C) and labels, or train_images and so on.

    Images are uint8, labels are class numbers, and ``classes`` (optional) are the class names.
    """
    names = ("images", "labels", "classes", f"{split}_images", f"{split}_labels")
    content = read_npz(Path(part), names)
    prefix = f"{split}_" if f"{split}_images" in content else ""
    try:
        images, labels = content[f"{prefix}images"], content[f"{prefix}labels"]
    except KeyError as e:
        raise DataCorrupt(
            f"{part} has no array {e}",
            must_be="images and labels, or train_images, train_labels, test_images, test_labels",
            got=", ".join(content) or "other arrays",
        ) from e
    if images.ndim == 3:
        images = images[..., None]  # grey
    if images.dtype != np.uint8 or images.ndim != 4 or not len(images):
        got = f"{images.dtype} {images.shape}"
        raise DataCorrupt(f"images of {part}", must_be="uint8 (N, H, W, C)", got=got)
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        got = f"{labels.dtype} {labels.shape}"
        raise DataCorrupt(f"labels of {part}", must_be="one class number per image", got=got)
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= MOST_CLASSES:
        must_be, got = f"0 to {MOST_CLASSES - 1:,}", f"{lowest} to {highest}"
        raise DataCorrupt(f"labels of {part}", must_be=must_be, got=got)
    titles = content.get("classes", np.arange(highest + 1))
    if titles.ndim != 1 or len(titles) <= highest:
        must_be, got = f"a vector of at least {highest + 1} names", f"shape {titles.shape}"
        raise DataCorrupt(f"classes of {part}", must_be=must_be, got=got)
    classes, origin = tuple(map(str, titles)), Path(part).name
    return ImageSet(f"arrays:{part}", split, images, labels.astype(np.int64), classes, origin)


def read_npz(file: Path, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
    """The arrays of a file that have one of the names; what they unpack to must fit into memory.

    Args:
        file: The ``.npz`` file.
        names: Which arrays to read; by default all of them.
    """
    try:
        if file.exists() and not file.is_file():
            raise ValueError("it is no file")  # opening a pipe would wait for ever
        with zipfile.ZipFile(file) as packed:
            wanted = [m for m in packed.infolist() if _is_among(m.filename, names)]
        unpacked, limit = sum(member.file_size for member in wanted), free_memory()
        if unpacked > limit:
            raise ValueError(f"it unpacks to {unpacked:,} bytes, {limit:,} are free")
        with file.open("rb") as f, np.load(f, allow_pickle=False) as content:
            return {name: content[name] for name in content.files if _is_among(name, names)}
    except FileNotFoundError as e:
        raise DataMissing(f"{file} does not exist", cure="Check the path.") from e
    except Exception as e:  # zipfile and zlib raise nearly any error on a damaged file
        raise DataCorrupt(
            f"{file} cannot be read: {e}", must_be="an .npz file of plain arrays, without objects"
        ) from e


def _is_among(name: str, names: Collection[str] | None) -> bool:
    return names is None or name.removesuffix(".npy") in names
