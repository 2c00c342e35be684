"""Where a run keeps what it has finished, so that the same command goes on after a kill.

``OUT.parts/`` holds parts of the table, a record beside each, and states of streams. A part counts
once its record is there, which is written last. ``OUT.json`` beside the finished table says what
it was made with.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from twoshift.errors import StorageError
from twoshift.predict.table import Sheet, check_format, join
from twoshift.storage import atomic_file, only_one, sha256, storage_errors, write_json

CARD, LOCK, STATES, LEAVING = "run.json", ".lock", "states", "leaving.json"
AGAIN = "Start anew: --overwrite."


class Work:
    """The folder of a run that is not finished.

    Args:
        out: The file that the table goes to.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.with_name(f"{out.name}.parts")
        self.card = out.with_name(f"{out.name}.json")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block, no other run writes to the same file."""
        check_format(self.out)
        if self.out.is_dir():
            raise StorageError(f"{self.out}", must_be="a file", got="a folder")
        _check_writable(self.out.parent)
        with only_one(self.folder / LOCK, f"writes {self.out}"):
            yield

    def begin(
        self, settings: Mapping[str, Any], overwrite: bool = False, start: str | None = None
    ) -> dict[str, Any] | None:
        """Begin a run, or go on with it.

        Args:
            settings: All that decides the table.
            overwrite: Whether to throw away what was made or begun before.
            start: Hash of the states that the run begins with.

        Returns:
            What the card of the finished table says, if there is nothing left to do; else None.
        """
        settings = json.loads(json.dumps(settings))  # as they are read back
        if overwrite:
            self.clear()
            with storage_errors("cannot write", self.card):
                self.card.unlink(missing_ok=True)
        begun = _read(self.folder / CARD)
        if begun is not None and begun["settings"] != settings and self._is_empty():
            begun = None  # nothing would be lost: the last command may have been a mistake
        if begun is not None:
            self._check(begun["settings"], settings, "was begun")
            if begun["start"] != start and not (self.folder / LEAVING).exists():
                what = f"the state has changed since {self.out} was begun"
                raise StorageError(what, cure=AGAIN)
            return None
        if self.out.exists() and not overwrite:
            if (done := _read(self.card)) is None:
                self.remove()
                raise StorageError(f"{self.out} exists", cure=f"Choose another file. {AGAIN}")
            try:
                self._check(done["settings"], settings, "was made")
            finally:
                self.remove()
            return done
        self.clear()
        write_json(self.folder / CARD, {"settings": settings, "start": start})
        return None

    def _is_empty(self) -> bool:
        """Whether nothing is finished yet."""
        return not any(True for ending in ("part-*", "pass-*") for _ in self.folder.glob(ending))

    def _check(self, old: Mapping[str, Any], new: Mapping[str, Any], what: str) -> None:
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                shown = f": {name} was {_short(old.get(name))}, is {_short(new.get(name))}"
                raise StorageError(f"{self.out} {what} with other settings{shown}", cure=AGAIN)

    def record(self, part: int) -> dict[str, Any] | None:
        """What is known of a finished part; None if it is not finished."""
        return _read(self._record(part))

    def finish_part(self, part: int, sheet: Sheet, record: Mapping[str, Any]) -> None:
        """Write a part and its record; from then on it is not done again."""
        path = self.part(part)
        with atomic_file(path) as temporary:
            sheet.write(temporary, self.out.suffix)
        write_json(self._record(part), {**record, "sha256": sha256(path)})

    def part(self, number: int) -> Path:
        """The file of a part."""
        return self.folder / f"part-{number:06}{self.out.suffix}"

    def _record(self, number: int) -> Path:
        return self.folder / f"part-{number:06}.json"

    def state_folder(self, stream: str, part: int) -> Path:
        """Where the state of a stream after a part is saved."""
        return self.folder / STATES / _file_name(stream) / f"{part:06}"

    def forget_states(self, stream: str, but: int | None = None) -> None:
        """Remove the states of a stream, except the one after a part."""
        folder = self.folder / STATES / _file_name(stream)
        kept = None if but is None else self.state_folder(stream, but)
        for child in folder.iterdir() if folder.is_dir() else ():
            if child != kept:
                shutil.rmtree(child, ignore_errors=True)

    def join(self, parts: int) -> None:
        """Make the table of all parts, which must be whole."""
        for number in range(parts):
            record, path = self.record(number), self.part(number)
            if record is None or not path.is_file() or sha256(path) != record["sha256"]:
                raise StorageError(f"{path} was changed or removed", cure=AGAIN)
        join([self.part(number) for number in range(parts)], self.out)

    def leaving(self) -> None:
        """Say that all parts are finished, and that states are about to be replaced."""
        write_json(self.folder / LEAVING, {})

    def finish(self, settings: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
        """Write the card of the finished table, and remove the rest."""
        write_json(self.card, {"settings": settings, "summary": summary})
        self.remove()

    def clear(self) -> None:
        """Forget everything that was finished."""
        with storage_errors("cannot write", self.folder):
            for child in list(self.folder.iterdir()) if self.folder.is_dir() else ():
                if child.name != LOCK:
                    shutil.rmtree(child) if child.is_dir() else child.unlink()

    def remove(self) -> None:
        """Remove the folder."""
        with storage_errors("cannot write", self.folder):
            shutil.rmtree(self.folder)


def state_home(folder: Path, stream: str, grouped: bool) -> Path:
    """Where a user finds the state of a stream: in the folder, or in one of its own below."""
    return folder / _file_name(stream) if grouped else folder


def _file_name(stream: str) -> str:
    """A file name for any name of a stream; different ones stay different."""
    name = quote(stream, safe=" ", errors="surrogateescape").replace(".", "%2E")
    return name if len(name) <= 200 else f"{name[:150]}-{_digest(stream)}"


def _digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON file that a run wrote; None if there is none."""
    with storage_errors("cannot read", path):
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as e:
            raise StorageError(f"{path} is damaged: {e}", cure=AGAIN) from e
    if not isinstance(content, dict):
        raise StorageError(f"{path} is damaged", cure=AGAIN)
    return content


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_writable(folder: Path) -> None:
    """Before the work rather than after it."""
    place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        must_be = "a folder that can be written"
        raise StorageError(f"cannot write into {folder}: {place}", must_be=must_be)
