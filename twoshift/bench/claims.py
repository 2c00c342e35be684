"""Claims: several benches on one store measure every cell once.

Whoever is about to measure a cell claims it in the store. A claim lasts `LEASE` seconds and is
renewed as long as its process lives. That of a dead process on this machine is void at once; that
of another machine when it has run out, for which the clocks must agree within some seconds.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Self

import psutil  # type: ignore[import-untyped]

from twoshift.bench.cell import Cell
from twoshift.bench.store import PATIENCE, Store
from twoshift.errors import StorageError

LEASE = 120.0  # seconds
BEATS = 6  # renewals per lease


class Claims:
    """The claims of this process on the cells of a store; released on exit.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._owner, self._host, self._pid = uuid.uuid4().hex, _host(), os.getpid()
        self._done = threading.Event()
        self._heart = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Self:
        self._heart.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._heart.join()
        with suppress(StorageError), self._store._writing():  # otherwise they run out
            self._store._db.execute("DELETE FROM claims WHERE owner = ?", [self._owner])

    def take(self, cell: Cell) -> bool:
        """Claim a cell; False if it has been measured, or somebody else has claimed it."""
        key = cell.key
        with self._store._writing():  # nobody else writes between the question and the claim
            if key in self._store or key in self._others():
                return False
            claim = (key, self._owner, self._host, self._pid, time.time() + LEASE)
            self._store._db.execute("INSERT OR REPLACE INTO claims VALUES (?, ?, ?, ?, ?)", claim)
        return True

    def free(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells that nobody else has claimed."""
        with self._store._errors():
            others = self._others()
        return [cell for cell in cells if cell.key not in others]

    def _others(self) -> set[str]:
        """The keys of cells that others are measuring."""
        query = "SELECT key, host, pid FROM claims WHERE owner != ? AND until > ?"
        rows = self._store._db.execute(query, [self._owner, time.time()]).fetchall()
        return {key for key, host, pid in rows if host != self._host or psutil.pid_exists(int(pid))}

    def _renew(self) -> None:
        while not self._done.wait(LEASE / BEATS):
            # a thread needs a connection of its own; a failed renewal is made up for by the next
            with (
                suppress(sqlite3.Error),
                closing(sqlite3.connect(self._store.path, timeout=PATIENCE)) as db,
                db,
            ):
                until = time.time() + LEASE
                db.execute("UPDATE claims SET until = ? WHERE owner = ?", [until, self._owner])


def _host() -> str:
    """Name of the machine, and of the container where process numbers mean something."""
    try:
        container = os.readlink("/proc/self/ns/pid")
    except OSError:
        container = ""
    return f"{socket.gethostname()} {container}"
