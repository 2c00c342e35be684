"""CIFAR-10 and CIFAR-100, from the official binary or pickled files.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009,
https://www.cs.toronto.edu/~kriz/cifar.html. Every file is checked against its official MD5 when it
is loaded; a pickled file is converted to binary records first, whose MD5 is the official one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twoshift.data._unpickle import read_pickle
from twoshift.data.base import ImageSet, check_split, datasets
from twoshift.errors import DataCorrupt, DataMissing

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class File:
    """One official file: its stem (plus ``.bin`` in the binary layout), image count and MD5."""

    stem: str
    images: int
    md5: str


@dataclass(frozen=True)
class Cifar:
    """Layout and checksums of one of the two data sets.

    Attributes:
        name: Registered name of the data set.
        binary: Name of the folder with the binary files.
        pickled: Name of the folder with the pickled files.
        label_keys: Keys of the labels in a pickled file, in the order of the label bytes at the
            start of a binary record; the last label is used.
        files: Files of each split, in order.
        classes: Names of the classes, by class number.
    """

    name: str
    binary: str
    pickled: str
    label_keys: tuple[bytes, ...]
    files: dict[str, tuple[File, ...]]
    classes: tuple[str, ...]

    @property
    def record(self) -> int:
        """Size of a binary record in bytes: labels, then the red, green and blue planes."""
        return len(self.label_keys) + PIXELS


_NAMES_10 = "airplane automobile bird cat deer dog frog horse ship truck"
_NAMES_100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain
mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain
plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

CIFAR10 = Cifar(
    "cifar10",
    binary="cifar-10-batches-bin",
    pickled="cifar-10-batches-py",
    label_keys=(b"labels",),
    files={
        "train": (
            File("data_batch_1", 10_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
            File("data_batch_2", 10_000, "5ea93a67294ea407fff1d09f752e9692"),
            File("data_batch_3", 10_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
            File("data_batch_4", 10_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
            File("data_batch_5", 10_000, "53f37980c15c3d472c316c40844f3f0d"),
        ),
        "test": (File("test_batch", 10_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),),
    },
    classes=tuple(_NAMES_10.split()),
)

CIFAR100 = Cifar(
    "cifar100",
    binary="cifar-100-binary",
    pickled="cifar-100-python",
    label_keys=(b"coarse_labels", b"fine_labels"),
    files={
        "train": (File("train", 50_000, "6172c7755cfe09b2fe270c85cebc1b15"),),
        "test": (File("test", 10_000, "4499cfba6c016c1be1438163640a0898"),),
    },
    classes=tuple(_NAMES_100.split()),
)


@datasets.register("cifar10")
def cifar10(split: str, root: Path) -> ImageSet:
    """CIFAR-10: 50,000 + 10,000 photographs of 32x32 pixels, 10 classes."""
    return load_cifar(CIFAR10, split, root)


@datasets.register("cifar100")
def cifar100(split: str, root: Path) -> ImageSet:
    """CIFAR-100: 50,000 + 10,000 photographs of 32x32 pixels, 100 (fine) classes."""
    return load_cifar(CIFAR100, split, root)


def load_cifar(facts: Cifar, split: str, root: Path) -> ImageSet:
    """Load and verify one split in whichever layout ``root`` holds; binary is preferred."""
    check_split(split)
    folder, binary = find_folder(facts, split, root)
    read = read_binary if binary else _read_pickled
    records = np.concatenate([read(facts, file, folder) for file in facts.files[split]])
    n_labels = len(facts.label_keys)
    planes = records[:, n_labels:].reshape(-1, 3, 32, 32)
    images = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    labels = records[:, n_labels - 1].astype(np.int64)
    origin = facts.binary if binary else facts.pickled
    return ImageSet(facts.name, split, images, labels, facts.classes, origin)


def find_folder(facts: Cifar, split: str, root: Path) -> tuple[Path, bool]:
    """The folder that holds all files of a split, and whether its layout is the binary one."""
    root = Path(root)
    layouts = ((facts.binary, True), (facts.pickled, False))
    # the root itself may be the folder of the files
    candidates = [(folder, binary) for name, binary in layouts for folder in (root / name, root)]
    missing: list[str] = []
    for folder, binary in candidates:
        names = [f"{file.stem}.bin" if binary else file.stem for file in facts.files[split]]
        absent = [name for name in names if not (folder / name).is_file()]
        if not absent:
            return folder, binary
        if len(absent) < len(names):
            missing = [str(folder / name) for name in absent]
    folders = ", ".join(dict.fromkeys(str(folder) for folder, _ in candidates))
    raise DataMissing(
        f"{facts.name} ({split}) is missing or incomplete in {folders}"
        + (f": no {', '.join(missing)}" if missing else ""),
        cure=f"Run: twoshift data get {facts.name}",
    )


def read_binary(facts: Cifar, file: File, folder: Path) -> NDArray[np.uint8]:
    """Read and verify the records of one binary file."""
    path = folder / f"{file.stem}.bin"
    size, expected = path.stat().st_size, file.images * facts.record
    if size != expected:
        what = f"{path} is truncated or not a {facts.name} file"
        raise _corrupt(facts, what, f"{expected} bytes", size)
    records = np.fromfile(path, dtype=np.uint8).reshape(file.images, facts.record)
    return _verified(facts, path, records, file.md5)


def _read_pickled(facts: Cifar, file: File, folder: Path) -> NDArray[np.uint8]:
    path = folder / file.stem
    size, smallest = path.stat().st_size, file.images * PIXELS
    if size < smallest:
        what = f"{path} is truncated or not a {facts.name} file"
        raise _corrupt(facts, what, f"at least {smallest} bytes", size)
    content = read_pickle(path)
    try:
        values = [content[key] for key in (*facts.label_keys, b"data")]
        columns = [np.asarray(x, np.uint8).reshape(file.images, -1) for x in values]
        records = np.hstack(columns).reshape(file.images, facts.record)
    except (KeyError, TypeError, ValueError, OverflowError) as e:
        must_be = f"{file.images} images and labels of {facts.name}"
        what = f"{path} is a pickle of something else: {str(e)[:200]}"
        raise _corrupt(facts, what, must_be) from e
    return _verified(facts, path, records, file.md5)


def _verified(facts: Cifar, path: Path, records: NDArray[np.uint8], md5: str) -> NDArray[np.uint8]:
    digest = hashlib.md5(np.ascontiguousarray(records).data, usedforsecurity=False).hexdigest()
    if digest != md5:
        raise _corrupt(facts, f"{path} was changed: MD5 of its records", md5, digest)
    return records


def _corrupt(facts: Cifar, what: str, must_be: str, got: object = None) -> DataCorrupt:
    cure = f"Remove it and run: twoshift data get {facts.name}"
    return DataCorrupt(what, must_be=must_be, got=got, cure=cure)
