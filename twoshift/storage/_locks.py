"""Work that only one process at a time may do."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twoshift.errors import StorageError
from twoshift.storage._files import storage_errors

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


@contextmanager
def only_one(path: Path, what: str) -> Iterator[None]:
    """Within the block, nobody else has the lock; one that is taken is an error, not waited for.

    The system frees the lock of a process that ends, however it ends. On a file system without
    locks there is none, as for saved folders.

    Args:
        path: The file of the lock; it stays, unless its folder is removed within the block.
        what: What the other one does, for the message: ``"writes out.csv"``.
    """
    descriptor = _locked(path, what)
    while not _is_at(descriptor, path):  # the one who had the lock has removed its folder
        os.close(descriptor)
        descriptor = _locked(path, what)
    try:
        yield
    finally:
        os.close(descriptor)


def _locked(path: Path, what: str) -> int:
    with storage_errors("cannot write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in NO_LOCKS:
            return descriptor
        os.close(descriptor)
        if e.errno in TAKEN:
            raise StorageError(f"another process {what}", cure="Wait until it ends.") from e
        raise StorageError(f"cannot lock {path}: {e.strerror}") from e
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
