"""Tables of images to predict: Parquet files and Hugging Face data sets.

Images stay in the table until their batch is due, so that a table may be larger than the memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twoshift.data.encoded import IMAGES
from twoshift.errors import DataCorrupt, DataMissing, MissingExtra, SettingError
from twoshift.predict.inputs import Listed, Raw, no_column

PATHS = ("path", "file", "filename", "file_name", "image_path")
IDS = ("id", "ids", "name", "key", *PATHS)
AHEAD = 64  # rows that are read at once


def parquet(path: Path, image: str | None, name: str | None) -> Listed:
    """The rows of a Parquet file, or of all of them in a folder.

    Args:
        path: The file or folder.
        image: Column of the images: encoded ones, or paths.
        name: Column of their names.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    if not files:
        raise DataMissing(f"no Parquet file in {path}", cure="Check the path.")
    pa, pq = import_pyarrow()
    try:
        schema = pq.read_schema(files[0])
        counts = [pq.read_metadata(file).num_rows for file in files]
    except (OSError, pa.ArrowException) as e:
        raise _incomplete(path, e) from e
    for file in files[1:]:
        if pq.read_schema(file).names != schema.names:
            must_be = f"with the columns of {files[0].name}"
            raise DataCorrupt(f"{file}", must_be=must_be, got=", ".join(pq.read_schema(file).names))
    known: list[str] = schema.names
    image = _chosen(str(path), known, image, (*IMAGES, *PATHS), "of images")
    name = _chosen(str(path), known, name, IDS) if name or {*IDS} & {*known} else None

    def columns(column: str) -> Sequence[Any]:
        try:
            tables = [pq.read_table(file, columns=[column]) for file in files]
        except (OSError, pa.ArrowException) as e:
            raise _incomplete(path, e) from e
        return [value for table in tables for value in table[column].to_pylist()]

    if name is None:
        ids = [f"{f.name}:{i}" for f, n in zip(files, counts, strict=True) for i in range(n)]
    else:
        ids = list(map(str, columns(name)))
    cells = _Cells(files, counts, image)
    base = path if path.is_dir() else path.parent

    def fetch(rows: Sequence[int]) -> list[Raw]:
        values = cells.take(rows)
        return [_raw(value, ids[row], base) for row, value in zip(rows, values, strict=True)]

    return Listed(str(path), ids, fetch, columns, known)


def hugging_face(part: str, image: str | None, name: str | None, split: str) -> Listed:
    """The rows of a data set of the Hub, or of a local folder: ``NAME`` or ``NAME:CONFIGURATION``.

    Args:
        part: Its name.
        image: Column of the images.
        name: Column of their names.
        split: Its split.
    """
    try:
        import datasets as library
    except ImportError as e:
        cure = "Run: pip install 'twoshift[hf]'"
        raise MissingExtra("Hugging Face data sets need datasets", cure=cure) from e
    title, _, configuration = part.partition(":")
    try:
        splits = library.load_dataset(title, configuration or None)
    except Exception as e:  # the hub, files and scripts may raise any error
        raise DataMissing(f"hf:{part} cannot be loaded: {e}", cure="Check name and network.") from e
    if split not in splits:
        cure = f"Choose one: --split {' | '.join(splits)}"
        raise SettingError(f"hf:{part} has no split {split!r}", cure=cure)
    table = splits[split]
    known: list[str] = table.column_names
    image = _chosen(part, known, image, (*IMAGES, *PATHS), "of images")
    name = _chosen(part, known, name, IDS) if name or {*IDS} & {*known} else None
    if isinstance(table.features[image], library.Image):
        table = table.cast_column(image, library.Image(decode=False))
    ids = [f"{split}:{i}" for i in range(len(table))]
    if name is not None:
        ids = list(map(str, table[name]))

    def fetch(rows: Sequence[int]) -> list[Raw]:
        values = table.select(list(rows))[image]
        return [_raw(v, ids[row], Path()) for row, v in zip(rows, values, strict=True)]

    return Listed(f"hf:{part}", ids, fetch, lambda column: table[column], known)


def import_pyarrow() -> tuple[Any, Any]:
    """The optional package and its reader of Parquet; an error says how to install it."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        cure = "Run: pip install 'twoshift[parquet]'"
        raise MissingExtra("Parquet files need pyarrow", cure=cure) from e
    return pa, pq


def _incomplete(path: Path, error: Exception) -> DataCorrupt:
    return DataCorrupt(f"{path} is not a complete Parquet file: {error}", cure="Get it again.")


def _chosen(
    name: str, known: Sequence[str], chosen: str | None, usual: Sequence[str], what: str = ""
) -> str:
    if chosen is not None and chosen not in known:
        raise no_column(name, chosen, known)
    if column := chosen or next((n for n in usual if n in known), None):
        return column
    cure = f"Name it: --image-column, one of {', '.join(known)}."
    raise SettingError(f"{name} has no column {what} with a usual name", cure=cure)


def _raw(value: Any, name: str, base: Path) -> Raw:
    """An encoded image or its path, of a cell: bytes, text, or Hugging Face's structure."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        return base / value
    if isinstance(value, bytes) and value:
        return value
    got = type(value).__name__ if value else "nothing"
    return DataCorrupt(f"image {name}", must_be="encoded, or a path", got=got)


class _Cells:
    """One column of Parquet files, read forwards a few rows at a time.

    Going back opens the file again, so rows that are asked for in another order than the files
    have them take longer, but no more memory.
    """

    def __init__(self, files: Sequence[Path], counts: Sequence[int], column: str) -> None:
        self._files, self._column = files, column
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._file = -1
        self._chunks: Iterator[list[Any]] = iter(())
        self._first, self._held = 0, list[Any]()  # the row of the file where the chunk starts

    def take(self, rows: Sequence[int]) -> list[Any]:
        """The values at some rows."""
        found = dict[int, Any]()
        with self._lock:
            for row in sorted(rows):
                found[row] = self._one(row)
        return [found[row] for row in rows]

    def _one(self, row: int) -> Any:
        file = int(np.searchsorted(self._starts, row, "right")) - 1
        local = row - int(self._starts[file])
        pa, _ = import_pyarrow()
        try:
            if file != self._file or local < self._first:
                self._open(file, local)
            while local >= self._first + len(self._held):
                self._first += len(self._held)
                self._held = next(self._chunks)
        except (OSError, StopIteration, pa.ArrowException) as e:
            self._forget()
            raise _incomplete(self._files[file], e) from e
        return self._held[local - self._first]

    def _open(self, file: int, local: int) -> None:
        """Begin with the row group that has a row."""
        _, pq = import_pyarrow()
        opened = pq.ParquetFile(self._files[file])
        group, first = 0, 0
        while local >= first + opened.metadata.row_group(group).num_rows:
            first += opened.metadata.row_group(group).num_rows
            group += 1
        groups = list(range(group, opened.metadata.num_row_groups))
        self._file, self._first, self._held = file, first, []
        self._chunks = _chunks(opened, groups, self._column)


def _chunks(opened: Any, groups: list[int], column: str) -> Iterator[list[Any]]:
    with opened:
        for batch in opened.iter_batches(AHEAD, row_groups=groups, columns=[column]):
            yield batch.column(0).to_pylist()
