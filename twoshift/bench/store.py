"""The store of results: an SQLite file with one checksummed record per cell.

Several processes may write at once. A record that was truncated or edited counts as missing.
Results are exported and imported as JSON lines.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

from twoshift.bench.cell import Cell, cell_from
from twoshift.bench.record import read_record
from twoshift.bench.result import Result
from twoshift.errors import CheckpointError, InputError, MismatchError, StorageError, TwoshiftError
from twoshift.storage import atomic_file, storage_errors

MAGIC = b"SQLite format 3\0"
APPLICATION = 0x32534846  # "2SHF": marks our files among SQLite files
PATIENCE = 60.0  # seconds to wait for another process that writes
LONGEST = 1 << 27  # bytes of an imported line
PAGE = 200  # records read at once, so that readers do not block writers for long
RECORD = "key TEXT PRIMARY KEY NOT NULL, content TEXT NOT NULL, trace BLOB, checksum TEXT NOT NULL"


def _results(db: sqlite3.Connection) -> None:
    db.execute(f"CREATE TABLE results ({RECORD})")
    db.execute("CREATE TABLE weights (recipe TEXT PRIMARY KEY NOT NULL, weights TEXT NOT NULL)")


def _failures(db: sqlite3.Connection) -> None:
    db.execute(f"CREATE TABLE failures ({RECORD})")


def _claims(db: sqlite3.Connection) -> None:
    columns = "owner TEXT NOT NULL, host TEXT NOT NULL, pid INTEGER NOT NULL, until REAL NOT NULL"
    db.execute(f"CREATE TABLE claims (key TEXT PRIMARY KEY NOT NULL, {columns})")


# Step i turns version i into version i + 1; an empty file is version 0. Never change, only append.
MIGRATIONS: list[Callable[[sqlite3.Connection], None]] = [_results, _failures, _claims]


class Failure(NamedTuple):
    """A cell that could not be measured.

    Attributes:
        key: Key of the cell.
        cell: The cell.
        error: The traceback.
        time: When it failed, as ISO 8601 in UTC.
    """

    key: str
    cell: Cell
    error: str
    time: str


class _Record(NamedTuple):
    """A row of results or failures."""

    key: str
    content: bytes
    trace: bytes | None
    checksum: str

    @classmethod
    def seal(cls, key: str, content: dict[str, Any], trace: Any = None) -> Self:
        packed = None if trace is None else zlib.compress(_canonical(trace))
        text = _canonical(content)
        return cls(key, text, packed, _checksum(key, text, packed))

    @property
    def valid(self) -> bool:
        return self.checksum == _checksum(self.key, self.content, self.trace)

    def result(self, trace: bool) -> Result:
        content = json.loads(self.content)
        if trace and self.trace is not None:
            content["trace"] = json.loads(zlib.decompress(self.trace))
        return Result.from_json(content)

    def failure(self) -> Failure:
        content = json.loads(self.content)
        return Failure(**{**content, "cell": cell_from(content["cell"])})


def _canonical(value: Any) -> bytes:
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as e:
        raise InputError("a result", must_be="plain data for JSON, without NaN", got=e) from e
    return text.encode()


def _checksum(key: str, content: bytes, trace: bytes | None) -> str:
    # canonical JSON has no line break, so the parts cannot run into each other
    return hashlib.sha256(b"\n".join([key.encode(), content, trace or b""])).hexdigest()


class Store:
    """Results by the key of their cell.

    Args:
        path: The file.
        create: Whether to create the file and its folder; otherwise a missing store is an error.
    """

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = Path(path)
        if create:
            with storage_errors("cannot write", self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
        elif not self.path.exists():
            raise StorageError(f"no results store at {self.path}", cure="Check the path.")
        _check_file(self.path)
        with self._errors():
            address = f"{self.path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
            self._db = sqlite3.connect(address, uri=True, timeout=PATIENCE, isolation_level=None)
        try:
            with self._errors():
                self._prepare(create)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _switch_to_wal(self) -> None:
        """Allow readers beside a writer. SQLite does not wait if others do so just now."""
        patience = time.monotonic() + PATIENCE
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as e:
                if "locked" not in str(e) or time.monotonic() > patience:
                    raise
            time.sleep(0.01)

    def put(self, result: Result) -> None:
        """Store a result, with its trace if it has one; it replaces one with the same key.

        The first result of a model decides which weights belong to the model's recipe.

        Raises:
            MismatchError: The result was measured with other weights than earlier ones.
        """
        with self._writing():
            self._put(result)

    def get(self, key: str) -> Result | None:
        """A result with its trace; None if it is missing or damaged."""
        record = self._find(key)
        return None if record is None else record.result(trace=True)

    def __contains__(self, key: str) -> bool:
        return self._find(key) is not None

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> set[str]:
        """The keys of all results that are not damaged."""
        return {r.key for r in self._scan() if r.valid}

    def damaged(self) -> list[str]:
        """The keys of records that were truncated or edited, and must be measured again."""
        return [r.key for r in self._scan() if not r.valid]

    def results(self, trace: bool = False) -> Iterator[Result]:
        """All results that are not damaged, sorted by key; much faster without traces."""
        return (r.result(trace) for r in self._scan() if r.valid)

    def fail(self, cell: Cell, error: str) -> None:
        """Record that a cell failed; a later result removes that record.

        Args:
            cell: The cell.
            error: The traceback.
        """
        time, key = datetime.now(UTC).isoformat(timespec="seconds"), cell.key
        content = {"key": key, "cell": asdict(cell), "error": error, "time": time}
        with self._writing():
            self._write("failures", _Record.seal(key, content))
            self._db.execute("DELETE FROM claims WHERE key = ?", [key])

    def failures(self) -> list[Failure]:
        """The cells that failed, the oldest failure first."""
        failures = (r.failure() for r in self._scan("failures") if r.valid)
        return sorted(failures, key=lambda failure: failure.time)

    def seconds(self) -> dict[tuple[str, str | None], float]:
        """Mean duration of a cell, by method and adapter."""
        durations: dict[tuple[str, str | None], list[float]] = defaultdict(list)
        for result in self.results():
            if (seconds := result.facts.get("seconds")) is not None:
                durations[result.cell.method, result.cell.adapter].append(seconds)
        return {kind: fmean(values) for kind, values in durations.items()}

    def _prepare(self, create: bool) -> None:
        with self._db:  # one transaction: another process may be creating the store just now
            self._db.execute("BEGIN")
            application, version = self._ask("application_id"), self._ask("user_version")
            empty = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
        fresh = empty and application == version == 0
        if application != APPLICATION and not (fresh and create):
            raise CheckpointError(f"{self.path} is not a results store", cure="Check the path.")
        if version > len(MIGRATIONS):
            raise CheckpointError(
                f"the version of the store {self.path}",
                must_be=f"at most {len(MIGRATIONS)}",
                got=version,
                cure="A newer twoshift has written it: pip install --upgrade twoshift.",
            )
        self._switch_to_wal()
        self._db.execute("PRAGMA synchronous = FULL")  # a result survives a power cut
        if version == len(MIGRATIONS):
            return
        with self._writing():
            version = self._ask("user_version")  # another process may have done some steps
            for step in MIGRATIONS[version:]:
                step(self._db)
            self._db.execute(f"PRAGMA application_id = {APPLICATION}")
            self._db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def _ask(self, pragma: str) -> int:
        return int(self._db.execute(f"PRAGMA {pragma}").fetchone()[0])

    def _put(self, result: Result) -> None:
        content = result.to_json()
        trace = content.pop("trace", None)
        self._check_weights(result)
        self._write("results", _Record.seal(result.key, content, trace))
        for table in ("failures", "claims"):
            self._db.execute(f"DELETE FROM {table} WHERE key = ?", [result.key])

    def _check_weights(self, result: Result) -> None:
        """Weights are not in a key: all results of a recipe, or of a key, must have the same."""
        model, key = result.cell.model, result.key
        used = [("source model", model.source_key if model else key, result.source.weights)]
        if result.adapter:
            recipe = model.adapter_key if model else f"{key}-adapter"
            used.append(("adapter", recipe, result.adapter))
        for what, recipe, weights in used:
            self._db.execute("INSERT OR IGNORE INTO weights VALUES (?, ?)", [recipe, weights])
            query = "SELECT weights FROM weights WHERE recipe = ?"
            ((known,),) = self._db.execute(query, [recipe])
            if weights != known:
                raise MismatchError(
                    f"weights of the {what} of a {result.cell.method!r} result",
                    must_be=f"those of the results in {self.path}, {known[:12]}",
                    got=weights[:12],
                    cure="Use the models that this store was started with, or start another store.",
                )

    def _write(self, table: str, record: _Record) -> None:
        # the content is written as text, so that other tools can read it
        row = (record.key, record.content.decode(), record.trace, record.checksum)
        self._db.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?, ?)", row)

    def _find(self, key: str) -> _Record | None:
        records = self._select("results", "key = ?", key)
        return records[0] if records and records[0].valid else None

    def _scan(self, table: str = "results") -> Iterator[_Record]:
        last = ""
        while page := self._select(table, "key > ?", last):
            yield from page
            last = page[-1].key

    def _select(self, table: str, where: str, key: str) -> list[_Record]:
        query = (
            "SELECT key, CAST(content AS BLOB), CAST(trace AS BLOB), checksum"
            f" FROM {table} WHERE {where} ORDER BY key LIMIT {PAGE}"
        )
        with self._errors():
            return [_Record(*row) for row in self._db.execute(query, [key])]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction: all of it or nothing."""
        with self._errors(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            yield

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:  # a bug, not a problem of the file
            raise
        except sqlite3.Error as e:
            raise _translated(e, self.path) from e


def _check_file(path: Path) -> None:
    """Refuse other files: SQLite takes a file of a few bytes for an empty one and overwrites it."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder, not a results store", cure="Check the path.")
    if path.is_file():
        with storage_errors("cannot read", path), path.open("rb") as file:
            if file.read(len(MAGIC)) not in (b"", MAGIC):
                raise CheckpointError(f"{path} is not a results store", cure="Check the path.")


def _translated(error: sqlite3.Error, path: Path) -> StorageError:
    """An error of SQLite, as one with a cure."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # other bits are details
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR):
        cure = "Restore it from a copy, or start another store and import published results."
        return CheckpointError(f"the store {path} is damaged: {error}", cure=cure)
    if code == sqlite3.SQLITE_BUSY:
        cure = f"Another process has locked it for {PATIENCE:.0f} s: wait for it or end it."
    elif code == sqlite3.SQLITE_FULL:
        cure = "Free some space. Stored results are safe, and the same command continues."
    else:
        cure = "Even to be read it must be in a folder you may write to: use a copy."
    return StorageError(f"cannot use the store {path}: {error}", cure=cure)


def export_lines(store: Store, path: str | Path, trace: bool = False) -> int:
    """Write all results as JSON lines, sorted by key.

    Returns:
        How many.
    """
    count = 0
    with atomic_file(Path(path)) as temporary, temporary.open("wb") as file:
        for result in store.results(trace):
            file.write(_canonical(result.to_json()) + b"\n")
            count += 1
    return count


def import_lines(store: Store, path: str | Path) -> int:
    """Read results from JSON lines; if one is wrong, none are stored. Existing results stay.

    Returns:
        How many were new.

    Raises:
        InputError: A line is not a result, or has something in it that no result has.
        MismatchError: A result was measured with weights that differ from those in the store.
    """
    known, count = store.keys(), 0
    with storage_errors("cannot read", Path(path)), Path(path).open("rb") as file, store._writing():
        for number, line in enumerate(iter(lambda: file.readline(LONGEST), b""), 1):
            try:
                if len(line) == LONGEST:
                    raise InputError("a line", must_be=f"shorter than {LONGEST:,} bytes")
                result = read_record(line)
                if result.key in known:
                    continue
                store._put(result)
            except (TypeError, ValueError, KeyError, AttributeError, TwoshiftError) as e:
                kind = MismatchError if isinstance(e, MismatchError) else InputError
                cure = "Nothing was imported: mend or remove that line, and import the file again."
                raise kind(f"{path}, line {number}: {e}", cure=cure) from e
            known.add(result.key)
            count += 1
    return count
