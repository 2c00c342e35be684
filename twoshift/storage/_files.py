"""Files that appear whole or not at all, and errors of the operating system that say what to do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from twoshift.errors import CheckpointError, StorageError, TwoshiftError

CURES = {
    "cannot read": "Check the path and its permissions.",
    "cannot write": "Choose a folder that is writable and has enough space; nothing was changed.",
}
# of file systems that cannot sync a folder
NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextmanager
def storage_errors(what: str, path: Path) -> Iterator[None]:
    """Turn errors of the operating system into a StorageError that names the path.

    Args:
        what: What fails: ``"cannot read"`` or ``"cannot write"``.
        path: The file or folder.
    """
    try:
        yield
    except TwoshiftError:  # some are OSErrors, too, with a better message
        raise
    except OSError as e:
        raise StorageError(f"{what} {path}: {e.strerror or e}", cure=CURES.get(what)) from e


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; what is no regular file is refused, without waiting for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        got = KINDS.get(stat.S_IFMT(mode), "something else")
        raise CheckpointError(f"{path}", must_be="a regular file", got=got)
    return os.fdopen(descriptor, "rb")


def temporary_path(path: Path) -> Path:
    """A name beside ``path`` that nobody else uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def create(path: Path) -> BinaryIO:
    """Open a new file for writing, with the permissions that the umask leaves."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno not in NO_SYNC:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; it replaces ``path`` only if the block succeeds."""
    with storage_errors("cannot write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_path(path)
        create(temporary).close()
        try:
            yield temporary
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; it replaces ``path`` only if the block succeeds.

    For folders that belong to twoshift altogether, such as unpacked data; `save_folder` leaves
    other files in place. An existing folder is first moved aside to ``.NAME.old``.
    """
    with storage_errors("cannot write", path):
        path = path.absolute()
        if Path.cwd().is_relative_to(path):
            what = f"{path} is the current working folder"
            raise StorageError(what, cure="Choose another folder.")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_path(path)
        temporary.mkdir()
        try:
            yield temporary
            old = aside(path)
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)
                path.rename(old)
            temporary.rename(path)
            sync(path.parent)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def aside(path: Path) -> Path:
    """Where a folder is while its successor takes its place."""
    return path.parent / f".{path.name}.old"


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically; NaN and infinity, which JSON does not have, are refused."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    with atomic_file(path) as temporary:
        temporary.write_text(text)
