"""Encoded images in tables: Parquet files and Hugging Face data sets.

They are unpacked once, into a cache folder named by a hash of their content, and read from there
like any other image files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twoshift.data._inventory import Inventory, image_files
from twoshift.data._lists import MOST_CLASSES
from twoshift.data.files import free_memory
from twoshift.data.own import SPLIT_NAMES
from twoshift.errors import DataCorrupt, DataMissing, MissingExtra
from twoshift.storage import atomic_folder

BATCH = 256  # rows that are unpacked at once
IMAGES = ("image", "img", "jpg", "png")
_LABELS = ("label", "labels", "fine_label", "class", "target")


@image_files("parquet", squash=False)
def parquet(split: str, root: Path, part: str) -> Inventory:
    """Parquet: parquet:FILE, or a folder of shards called train-* and test-*; needs pyarrow.

    The table has a column of encoded images (bytes, or Hugging Face's structure) and one of labels.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        cure = "Run: pip install 'twoshift[parquet]'"
        raise MissingExtra("Parquet files need pyarrow", cure=cure) from e
    files = _shards(Path(part), split)
    try:
        schema = pq.read_schema(files[0])
        image, label = _column(part, schema.names, IMAGES), _column(part, schema.names, _LABELS)
        batches, left = [], free_memory()
        for file in files:
            for batch in pq.ParquetFile(file).iter_batches(BATCH, columns=[image, label]):
                left -= batch.nbytes  # a small file may repeat one image a million times
                if left < 0:
                    raise DataCorrupt(f"{part} unpacks to more than the free memory")
                batches.append(batch)
        rows = pa.Table.from_batches(batches)
    except (OSError, pa.ArrowException) as e:
        what = f"{part} is not a complete Parquet file: {e}"
        raise DataCorrupt(what, cure="Get it again.") from e
    names = _class_names(schema.metadata or {}, label)
    paths = _unpack(part, rows[image].to_pylist(), root)
    labels, classes = _class_numbers(part, rows[label].to_pylist(), names)
    return Inventory(f"parquet:{part}", split, paths, labels, classes, source=Path(part).name)


@image_files("hf", squash=False)
def hf(split: str, root: Path, part: str) -> Inventory:
    """Hugging Face: hf:NAME, hf:NAME:CONFIGURATION or a local folder; needs datasets."""
    try:
        import datasets as library
    except ImportError as e:
        cure = "Run: pip install 'twoshift[hf]'"
        raise MissingExtra("Hugging Face data sets need datasets", cure=cure) from e
    name, _, configuration = part.partition(":")
    try:
        splits = library.load_dataset(name, configuration or None)
    except Exception as e:  # the hub, files and scripts may raise any error
        raise DataMissing(f"hf:{part} cannot be loaded: {e}", cure="Check name and network.") from e
    title = next((title for title in SPLIT_NAMES[split] if title in splits), None)
    if title is None:
        raise DataMissing(f"hf:{part} has no split {split}", got=", ".join(splits))
    table = splits[title]
    image, label = (_column(part, table.column_names, names) for names in (IMAGES, _LABELS))
    feature = table.features[label]
    names = feature.names if isinstance(feature, library.ClassLabel) else None
    table = table.cast_column(image, library.Image(decode=False))
    paths = _unpack(part, table[image], root)
    labels, classes = _class_numbers(part, table[label], names)
    return Inventory(f"hf:{part}", split, paths, labels, classes, source=f"{name}, {title}")


def _shards(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(path.rglob("*.parquet"))
    if any(file.name.startswith(sum(SPLIT_NAMES.values(), ())) for file in files):
        files = [file for file in files if file.name.startswith(SPLIT_NAMES[split])]
    if not files:
        raise DataMissing(f"no Parquet file of {split} in {path}", cure="Check the path.")
    return files


def _column(part: str, columns: Sequence[str], names: Sequence[str]) -> str:
    if column := next((name for name in names if name in columns), None):
        return column
    raise DataCorrupt(f"{part} has no column {' or '.join(names)}", got=", ".join(columns))


def _class_names(metadata: dict[bytes, bytes], label: str) -> list[str] | None:
    """Names of the classes, if Hugging Face wrote them into the schema."""
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return None
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if is_list else None


def _class_numbers(
    part: str, values: Iterable[Any], names: Sequence[str] | None
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], tuple[str, ...]]:
    """Class numbers and class names; text labels without known names are numbered by alphabet."""
    values = list(values)
    if values and all(isinstance(value, str) for value in values):
        names = sorted(set(values)) if names is None else names
        number_of = {name: number for number, name in enumerate(names)}
        values = [number_of.get(value, -1) for value in values]
    if not values or not all(type(x) is int and 0 <= x < MOST_CLASSES for x in values):
        must_be = f"class names, or numbers below {MOST_CLASSES:,}, one per image"
        raise DataCorrupt(f"labels of {part}", must_be=must_be)
    names = names or list(map(str, range(max(values) + 1)))
    if max(values) >= len(names):
        raise DataCorrupt(f"labels of {part}", must_be=f"below {len(names)}", got=max(values))
    return np.array(values, np.int64), tuple(names)


def _unpack(part: str, encoded: Iterable[Any], root: Path) -> list[str]:
    """Paths of the images, which are written to the cache unless they are files already."""
    cells = [cell if isinstance(cell, dict) else {"bytes": cell} for cell in encoded]
    if cells and all(not cell.get("bytes") and cell.get("path") for cell in cells):
        return [cell["path"] for cell in cells]
    if not all(isinstance(cell.get("bytes"), bytes) for cell in cells):
        raise DataCorrupt(f"images of {part}", must_be="the bytes of image files")
    digest = hashlib.sha256()
    for cell in cells:
        digest.update(hashlib.sha256(cell["bytes"]).digest())
    folder = root / "cache" / "unpacked" / digest.hexdigest()[:32]
    if not folder.is_dir():
        with atomic_folder(folder) as fresh:
            for i, cell in enumerate(cells):
                (fresh / f"{i:08}").write_bytes(cell["bytes"])
    return [str(folder / f"{i:08}") for i in range(len(cells))]
