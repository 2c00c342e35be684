"""What to predict: unlabelled images in a fixed order, each in a stream.

A folder tree, a list of paths, a Parquet table, an ``.npz`` file or a Hugging Face data set. Only
names are read here; pixels are read batch by batch, in `twoshift.predict.reading`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twoshift.data._inventory import SUFFIXES
from twoshift.data._lists import text_of
from twoshift.data.own import read_npz
from twoshift.errors import DataCorrupt, DataError, DataMissing, SettingError
from twoshift.registry import check_choice, near_miss

DEFAULT = "default"  # the stream of images that are not grouped
FOLDER = "folder"
GIVEN, NAME, TIME = "given", "name", "time"
ORDERS = (GIVEN, NAME, TIME)
LABEL = re.compile(r"\s+\d+$")  # after the path in a list for `list:`

# an encoded image, the path of one, its pixels, or why there is none
Raw = bytes | Path | NDArray[np.uint8] | DataError
Fetch = Callable[[Sequence[int]], list[Raw]]


@dataclass(frozen=True)
class Listed:
    """Images as they are listed somewhere, before they are put in order.

    Attributes:
        name: What was listed, for messages.
        ids: Path or name of every image.
        fetch: Gives the encoded images at some rows.
        columns: Reads a further column by name: a value for each image.
        known: Names of the columns.
        natural: The order if none is chosen.
        notes: Remarks for the user.
    """

    name: str
    ids: Sequence[str]
    fetch: Fetch
    columns: Callable[[str], Sequence[Any]]
    known: Sequence[str]
    natural: str = GIVEN
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gallery:
    """Images in a fixed order; those of one stream lie side by side.

    Attributes:
        name: Where they come from, for messages.
        ids: Path or name of every image.
        streams: Name of the stream of every image.
        rows: Where `fetch` finds each of them.
        fetch: Gives the encoded images at some rows.
        grouped: Whether there may be several streams.
        notes: Remarks for the user.
    """

    name: str
    ids: Sequence[str]
    streams: Sequence[str]
    rows: NDArray[np.int64]
    fetch: Fetch
    grouped: bool = False
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def identity(self) -> str:
        """Hash of names, streams and order."""
        digest = hashlib.sha256()
        for name, stream in zip(self.ids, self.streams, strict=True):
            digest.update(f"{name}\0{stream}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()


def open_gallery(
    source: str,
    *,
    order: str | None = None,
    group_by: str | None = None,
    image_column: str | None = None,
    id_column: str | None = None,
    split: str = "test",
) -> Gallery:
    """The images that a user named, in a fixed order.

    Args:
        source: A folder, a ``.parquet`` or ``.npz`` file, or ``folder:PATH``, ``list:FILE``,
            ``parquet:PATH``, ``arrays:FILE`` or ``hf:NAME``.
        order: ``"name"``, ``"time"``, ``"given"``, or a column of a table. By default files of a
            folder are ordered by name, and anything else is taken as given.
        group_by: ``"folder"``, or a column of a table: each group is a stream of its own.
        image_column: Column of the images in a table, if its name is not a usual one.
        id_column: Column of the names of the images.
        split: Split of a Hugging Face data set, or prefix of the arrays in a file.
    """
    listed = _listed(source, image_column, id_column, split)
    if not len(listed.ids):
        raise DataMissing(f"no images in {listed.name}", cure="Check the path.")
    groups = None if group_by is None else _groups(listed, group_by)
    rows = _sorted(listed, order or listed.natural)
    streams = [DEFAULT] * len(rows)
    if groups is not None:
        rows = np.array(sorted(rows.tolist(), key=groups.__getitem__), np.int64)  # stable
        streams = [groups[row] for row in rows]
    return Gallery(
        listed.name,
        [listed.ids[row] for row in rows],
        streams,
        rows,
        listed.fetch,
        groups is not None,
        listed.notes,
    )


def _listed(source: str, image: str | None, name: str | None, split: str) -> Listed:
    kind, colon, part = source.partition(":")
    readers: dict[str, Callable[[str], Listed]] = {
        "folder": lambda part: _folder(Path(part)),
        "list": lambda part: _list(Path(part)),
        "parquet": lambda part: _tables().parquet(Path(part), image, name),
        "arrays": lambda part: _arrays(Path(part), name, split),
        "hf": lambda part: _tables().hugging_face(part, image, name, split),
    }
    if not colon or kind not in readers:
        if colon and not Path(source).exists():
            raise SettingError(f"images {source!r}", cure=near_miss(kind, readers))
        kind, part = _guess(Path(source)), source
    if kind not in ("parquet", "hf") and image is not None:
        raise SettingError("--image-column", must_be="used with a table", got=source)
    return readers[kind](part)


def _guess(path: Path) -> str:
    """What a path is without a word in front of it."""
    if path.suffix == ".npz":
        return "arrays"
    if path.suffix == ".parquet" and path.is_file():
        return "parquet"
    if path.is_file():
        cure = f"Images in a list: list:{path}"
        raise SettingError(f"{path}", must_be="a folder, a .parquet or an .npz file", cure=cure)
    if path.is_dir():
        names = (n.lower() for _, _, files in os.walk(path) for n in files if n[0] != ".")
        first = next((n for n in names if n.endswith((".parquet", *SUFFIXES))), "")
        return "parquet" if first.endswith(".parquet") else "folder"
    raise DataMissing(f"{path} does not exist", cure="Check the path.")


def _tables() -> Any:
    """The readers of tables, which need other packages; imported only if a table is named."""
    from twoshift.predict import tables

    return tables


def _folder(folder: Path) -> Listed:
    if not folder.is_dir():
        raise DataMissing(f"no folder {folder}", cure="Check the path.")
    found, others, links = list[str](), 0, 0
    for parent, children, files in os.walk(folder):
        links += sum(os.path.islink(os.path.join(parent, child)) for child in children)
        children[:] = [child for child in children if not child.startswith(".")]
        base = os.path.relpath(parent, folder)
        for file in files:
            if file.startswith("."):
                continue
            if not file.lower().endswith(SUFFIXES):
                others += 1
                continue
            found.append(file if base == "." else os.path.join(base, file))
    if not found:
        raise DataMissing(
            f"no images in {folder}", must_be=f"files that end in {', '.join(SUFFIXES)}"
        )
    found.sort()
    notes = [f"{others:,} files that are not images are left out"] if others else []
    if links:  # they may lead in circles
        notes.append(f"{links:,} links to folders are not followed")
    paths = [os.path.join(folder, name) for name in found]
    listed = _files(str(folder), paths, paths, [os.path.dirname(name) for name in found])
    return replace(listed, natural=NAME, notes=tuple(notes))


def _list(file: Path) -> Listed:
    lines = [line.strip() for line in text_of(file).splitlines() if line.strip()]
    paths = [file.parent / line for line in lines]
    # a list for `list:` has a class number after each path
    if lines and all(map(LABEL.search, lines)) and not paths[0].exists():
        lines = [LABEL.sub("", line) for line in lines]
        paths = [file.parent / line for line in lines]
    if not lines:
        raise DataCorrupt(f"{file} is empty", must_be="a path in each line")
    return _files(str(file), list(map(str, paths)), lines, [os.path.dirname(x) for x in lines])


def _files(name: str, paths: list[str], ids: list[str], folders: list[str]) -> Listed:
    def columns(column: str) -> Sequence[Any]:
        if column == FOLDER:
            return [folder or DEFAULT for folder in folders]
        return [_modified(path) for path in paths]

    def fetch(rows: Sequence[int]) -> list[Raw]:
        return [Path(paths[row]) for row in rows]

    return Listed(name, ids, fetch, columns, (FOLDER, TIME))


def _modified(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0  # a file that is missing has a row, too


def _arrays(file: Path, id_column: str | None, split: str) -> Listed:
    wanted = ("images", f"{split}_images")
    content = read_npz(file)
    key = next((key for key in reversed(wanted) if key in content), None)
    if key is None:
        got = ", ".join(content) or "nothing"
        raise DataCorrupt(f"{file}", must_be=f"a file with an array {wanted[0]!r}", got=got)
    images = content.pop(key)
    images = images[..., None] if images.ndim == 3 else images
    if images.dtype != np.uint8 or images.ndim != 4:
        got = f"{images.dtype} {images.shape}"
        raise DataCorrupt(f"images of {file}", must_be="uint8 (N, H, W, C)", got=got)
    known = [n for n, a in content.items() if a.ndim == 1 and len(a) == len(images)]

    def columns(column: str) -> Sequence[Any]:
        return list(content[column].tolist())

    id_column = id_column or next((n for n in ("ids", "paths", "names") if n in known), None)
    if id_column is not None and id_column not in known:
        raise no_column(str(file), id_column, known)
    ids = [f"{file.name}:{i}" for i in range(len(images))]
    if id_column is not None:
        ids = list(map(str, columns(id_column)))
    return Listed(str(file), ids, lambda rows: [images[r] for r in rows], columns, known)


def no_column(name: str, column: str, known: Iterable[str]) -> SettingError:
    """An error: a table has no such column."""
    there = ", ".join(known) or "none"
    return SettingError(f"{name} has no column {column!r}", cure=f"It has: {there}.")


def _groups(listed: Listed, column: str) -> list[str]:
    """The stream of every image."""
    if column not in listed.known:
        raise no_column(listed.name, column, listed.known)
    return [str(value) or DEFAULT for value in listed.columns(column)]


def _sorted(listed: Listed, order: str) -> NDArray[np.int64]:
    """Rows in order; of equals, the first that is listed comes first."""
    if order not in listed.known:
        check_choice("the images", [*ORDERS[:2], *listed.known], order=order)
    count = len(listed.ids)
    if order == GIVEN:
        return np.arange(count)
    keys = listed.ids if order == NAME else listed.columns(order)
    if any(key is None for key in keys):
        raise DataCorrupt(f"column {order!r} of {listed.name}", must_be="without gaps")
    names = listed.ids  # of the same time, by name
    return np.array(sorted(range(count), key=lambda row: (keys[row], names[row])), np.int64)
