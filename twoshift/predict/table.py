"""The table of predictions: its columns, and files of it in Parquet or CSV.

A run writes parts and joins them at the end. The same rows give the same bytes.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from twoshift.errors import SettingError
from twoshift.predict.tables import import_pyarrow
from twoshift.storage import atomic_file

FORMATS = (".parquet", ".csv")
Kind = Literal["text", "whole", "real"]
TEXT: Kind = "text"
WHOLE: Kind = "whole"
REAL: Kind = "real"


class Column(NamedTuple):
    """A column: its name, and what is in it. Texts and real numbers may be missing."""

    name: str
    kind: Kind


class Shape(NamedTuple):
    """What a user wants in the table.

    Attributes:
        classes: Names of the classes.
        online: Whether predictions depend on their batch.
        baseline: Whether the unadapted model predicts, too.
        top: How many of the likeliest classes.
        probabilities: Whether to write the probabilities of all classes.
    """

    classes: tuple[str, ...]
    online: bool = True
    baseline: bool = True
    top: int = 1
    probabilities: bool = False

    def columns(self) -> list[Column]:
        """All columns, in order."""
        found = [Column("path", TEXT), Column("class", TEXT)]
        found += [Column("probability", REAL), Column("entropy", REAL)]
        for place in range(2, self.top + 1):
            found += [Column(f"class_{place}", TEXT), Column(f"probability_{place}", REAL)]
        if self.baseline:
            found.append(Column("unadapted", TEXT))
        found.append(Column("stream", TEXT))
        if self.online:
            found.append(Column("batch", WHOLE))
        found += [Column("state_version", WHOLE), Column("error", TEXT)]
        if self.probabilities:
            found += [Column(f"p_{' '.join(name.split())}", REAL) for name in self.classes]
        return found


def check_format(path: Path) -> None:
    """Refuse a file of another format, before any work is done."""
    if path.suffix not in FORMATS:
        must_be = "FILE.parquet or FILE.csv"
        raise SettingError("the file of predictions", must_be=must_be, got=path.name)
    if path.suffix == ".parquet":
        import_pyarrow()


class Sheet:
    """Rows of a table, batch by batch."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = columns
        self._chunks: dict[str, list[Any]] = {column.name: [] for column in columns}

    def add(self, values: dict[str, Any]) -> None:
        """Add rows: lists or arrays of the same length, by column."""
        for name, chunks in self._chunks.items():
            chunks.append(values[name])

    def column(self, name: str) -> list[Any] | NDArray[Any]:
        """All values of a column."""
        chunks = self._chunks[name]
        if chunks and isinstance(chunks[0], np.ndarray):
            return np.concatenate(chunks)
        return [value for chunk in chunks for value in chunk]

    def write(self, path: Path, suffix: str) -> None:
        """Write the rows, in the format of a suffix."""
        if suffix == ".parquet":
            self._write_parquet(path)
        else:
            self._write_csv(path)

    def _write_csv(self, path: Path) -> None:
        values = [_texts(column.kind, self.column(column.name)) for column in self.columns]
        with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(column.name for column in self.columns)
            writer.writerows(zip(*values, strict=True))

    def _write_parquet(self, path: Path) -> None:
        pa, pq = import_pyarrow()
        types = {TEXT: pa.string(), WHOLE: pa.int64(), REAL: pa.float32()}
        arrays = []
        for name, kind in self.columns:
            values: Any = self.column(name)
            if kind == TEXT:  # names of files may have bytes that are no text
                values = [v and v.encode(errors="backslashreplace").decode() for v in values]
            arrays.append(pa.array(values, types[kind], from_pandas=kind == REAL))
        table = pa.Table.from_arrays(arrays, names=[column.name for column in self.columns])
        pq.write_table(table, path)


def _texts(kind: Kind, values: Sequence[Any] | NDArray[Any]) -> list[str]:
    if kind == TEXT:
        return ["" if value is None else value for value in values]
    if kind == WHOLE:
        return list(map(str, values))
    # float32 has no more digits
    return ["" if math.isnan(value) else f"{value:.9g}" for value in map(float, values)]


def join(parts: Sequence[Path], out: Path) -> None:
    """Make one file of parts, which stay, in their order; it replaces ``out`` in one step."""
    with atomic_file(out) as temporary:
        if out.suffix == ".parquet":
            _join_parquet(parts, temporary)
        else:
            _join_csv(parts, temporary)


def _join_csv(parts: Sequence[Path], out: Path) -> None:
    with out.open("wb") as joined:
        for i, part in enumerate(parts):
            with part.open("rb") as file:
                header = file.readline()  # names of columns have no line breaks: see `Shape`
                if i == 0:
                    joined.write(header)
                while block := file.read(1 << 20):
                    joined.write(block)


def _join_parquet(parts: Sequence[Path], out: Path) -> None:
    _, pq = import_pyarrow()
    with closing(pq.ParquetWriter(out, pq.read_schema(parts[0]))) as writer:
        for part in parts:
            writer.write_table(pq.read_table(part))
