"""Saved folders: files named by their content under one card, replaced by one rename of the card.

A save writes the new files under temporary names, then a copy of the old card and the new card.
It renames the files, then the card: from then on readers find the new content. At last it removes
what only the old card lists. Since a killed save leaves both cards behind, the next one knows which
files nobody needs. The folder itself is never renamed, so it may be a link or a mount point.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twoshift.errors import CheckpointError, StorageError
from twoshift.storage._cards import CARD, LARGEST, RESTORE, File, files_of, make_card, parse_card
from twoshift.storage._files import aside, create, open_regular, storage_errors, sync
from twoshift.storage._locks import NO_LOCKS
from twoshift.storage._tensors import from_bytes, to_bytes

if TYPE_CHECKING:
    from torch import Tensor

ENDING = ".safetensors"
MARK = ".twoshift-"  # begins the name of everything temporary
LOCK = f"{MARK}lock"
GONE = (errno.ENOENT, errno.ESTALE)
TRIES = 100  # to read a folder that is saved all the time; the second almost always succeeds


class Saved(NamedTuple):
    """A saved folder, read and checked.

    Attributes:
        folder: Where it was found, absolute.
        card: The card, without its checksum.
        digests: SHA-256 of every file, by name.
        tensors: The tensors of every file, by name.
    """

    folder: Path
    card: dict[str, Any]
    digests: dict[str, str]
    tensors: dict[str, dict[str, Tensor]]

    def file(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file that must be there."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} has no file {name!r}", cure=RESTORE)
        return self.tensors[name]


def save_folder(
    folder: str | Path,
    kind: str,
    content: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Write a card and files of tensors into ``folder``, in one step.

    After a crash, the folder has the old content or the new one. Files of other people stay.

    Args:
        folder: Where to save; it may exist, be a link or a mount point, or have an older save.
        kind: What is saved, for example ``"adapter"``.
        content: Fields of the card: whatever JSON can say.
        tensors: The files by name (letters, digits, ``_``), each with its tensors by name.
    """
    folder = Path(folder).absolute()
    with storage_errors("cannot write", folder):
        _make(folder)
        with _alone(folder) as locked:
            if locked:
                _sweep(folder)  # what killed saves left: nobody else is at work
            save = f"{MARK}{secrets.token_hex(8)}"
            try:
                _write(folder, save, kind, content, tensors)
            finally:
                _sweep(folder, save)


def _make(folder: Path) -> None:
    if (old := saved_folder(folder)) != folder:
        old.rename(folder)
    elif not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)


def _write(
    folder: Path,
    save: str,
    kind: str,
    content: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Tensor]],
) -> None:
    path, files, renames = folder / CARD, {}, {}
    old = _replaceable(path)
    for i, (name, part) in enumerate(tensors.items()):
        raw, temporary = to_bytes(part), folder / f"{save}.{i}.part"
        digest = hashlib.sha256(raw).hexdigest()
        files[name] = File(file=f"{name}-{digest[:12]}{ENDING}", sha256=digest)
        renames[temporary] = folder / files[name].file
        _write_bytes(temporary, raw)
        del raw  # not two files in memory
    try:
        new = make_card(kind, content, files)
    except (TypeError, ValueError, RecursionError) as e:
        must_be = "finite numbers, texts, and lists or dictionaries of them"
        raise StorageError(f"{path}: {e}", must_be=must_be) from e
    parse_card(new, path, kind)  # what is saved can be loaded
    if old is not None:
        (folder / f"{save}.old.card").write_bytes(old)  # only so that a next save may tidy up
    _write_bytes(folder / f"{save}.new.card", new)
    for temporary, final in renames.items():
        temporary.replace(final)
    sync(folder)
    (folder / f"{save}.new.card").replace(path)
    with storage_errors("cannot sync", folder):  # no "nothing was changed": the new card is there
        sync(folder)


def _write_bytes(path: Path, raw: bytes) -> None:
    with create(path) as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _replaceable(path: Path) -> bytes | None:
    """The card that a save replaces, if there is one; a file that is no card is refused."""
    try:
        with open_regular(path) as file:
            raw = file.read(LARGEST + 1)
    except FileNotFoundError:
        return None
    if raw and not re.match(rb'\s*\{\s*"kind"', raw):
        cure = "Save to another folder, or move that file."
        raise StorageError(f"{path} is not a card of twoshift", cure=cure)
    return raw


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Let one process or thread at a time save; False if the file system has no locks."""
    path = folder / LOCK
    while True:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "rb") as lock:
            locked = True
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as e:
                if e.errno not in NO_LOCKS:
                    raise
                locked = False
            if not _is_at(lock, path):
                continue  # the one who had the lock has removed its file
            try:
                yield locked
            finally:
                path.unlink(missing_ok=True)
                with suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_UN)  # a forked process may have the file, too
            return


def _is_at(file: BufferedReader, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sweep(folder: Path, save: str = MARK) -> None:
    """Remove temporary files, and what the cards among them list but the present card does not."""
    with suppress(OSError):
        needed = _listed(folder / CARD)
        for path in folder.glob(f"{save}*.card"):
            unneeded = (_listed(path) or set()) - (needed or set())
            if needed is not None:  # a damaged card may need anything
                for name in sorted(unneeded):
                    _remove(folder / name)
            _remove(path)
        for path in folder.glob(f"{save}*.part"):
            _remove(path)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _listed(path: Path) -> set[str] | None:
    """Files of tensors that a card lists, none if there is no card; None if it is damaged."""
    try:
        with open_regular(path) as file:
            card = parse_card(file.read(LARGEST + 1), path)
        return {f.file for f in files_of(card).values() if f.file.endswith(ENDING)}
    except FileNotFoundError:
        return set()
    except (OSError, CheckpointError):
        return None


def read_folder(folder: str | Path, kind: str) -> Saved:
    """Read a saved folder: its card, and the tensors of its files.

    Every file is opened once, and what was read is what is checked and used.

    Args:
        folder: Folder that was saved.
        kind: Kind that it must have, for example ``"source model"``.
    """
    found, card, contents = _read(Path(folder), kind, keep=True)
    digests = {name: file.sha256 for name, file in files_of(card).items()}
    tensors = {}
    for name, file in files_of(card).items():
        tensors[name] = from_bytes(contents.pop(name), found / file.file)
    return Saved(found, card, digests, tensors)


def read_card(folder: str | Path, kind: str) -> dict[str, Any]:
    """The card of a saved folder; its files are checked, too."""
    return _read(Path(folder), kind, keep=False)[1]


def saved_files(folder: str | Path) -> dict[str, Path]:
    """The files of a saved folder, by name."""
    found = saved_folder(Path(folder).absolute())
    return {name: found / f.file for name, f in files_of(_card(found, "save")[0]).items()}


def saved_folder(path: Path) -> Path:
    """``path``, or where a save of 0.1.0 left its content if killed between two renames."""
    return aside(path) if not path.exists() and (aside(path) / CARD).exists() else path


def is_saved(folder: str | Path) -> bool:
    """Whether a folder has a save, whole or damaged; what a killed first save left is none."""
    folder = Path(folder).absolute()
    with storage_errors("cannot read", folder):
        folder = saved_folder(folder)
        if not folder.is_dir() or (folder / CARD).exists():
            return folder.is_dir()
        return any(folder.glob(f"*{ENDING}")) and not any(folder.glob(f"{MARK}*"))


def _read(folder: Path, kind: str, keep: bool) -> tuple[Path, dict[str, Any], dict[str, bytes]]:
    """Where a folder was found, its card, and the content of its files if it is to be kept."""
    folder = folder.absolute()
    with storage_errors("cannot read", folder):
        found = saved_folder(folder)
        for _ in range(TRIES):
            card, stamp = _card(found, kind, kind)
            try:
                return found, card, _contents(found, card, keep)
            except OSError as e:
                if e.errno not in GONE:
                    raise
                missing = e.filename or found
            if _stamp(found / CARD) == stamp:
                raise CheckpointError(f"{missing} is missing", cure=RESTORE)
    raise CheckpointError(f"{folder} is being saved again and again", cure="Try again.")


def _card(folder: Path, what: str, kind: str | None = None) -> tuple[dict[str, Any], object]:
    """The card of a folder, and what tells it from later ones."""
    path = folder / CARD
    try:
        with open_regular(_inside(folder, CARD)) as file:
            raw, stamp = file.read(LARGEST + 1), _stamp(file.fileno())
    except (FileNotFoundError, NotADirectoryError):
        what = f"no {what} in {folder}: {CARD} is missing"
        raise CheckpointError(what, cure="Check the path.") from None
    return parse_card(raw, path, kind), stamp


def _stamp(file: int | Path) -> object:
    stat = os.stat(file)
    return stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns


def _contents(folder: Path, card: Mapping[str, Any], keep: bool) -> dict[str, bytes]:
    with ExitStack() as opened:
        files = {
            # all of them before any is read: a file that is open can be read when it is removed
            name: (file, opened.enter_context(open_regular(_inside(folder, file.file))))
            for name, file in files_of(card).items()
        }
        return {name: _content(folder / f.file, f, raw, keep) for name, (f, raw) in files.items()}


def _content(path: Path, file: File, opened: BufferedReader, keep: bool) -> bytes:
    try:
        content = opened.read() if keep else b""
    except MemoryError as e:
        raise CheckpointError(f"{path} does not fit into memory", cure=RESTORE) from e
    digest = hashlib.sha256(content) if keep else hashlib.file_digest(opened, "sha256")
    if digest.hexdigest() != file.sha256:
        what = f"{path} is truncated or edited: its SHA-256 differs from the card's"
        raise CheckpointError(what, cure=RESTORE)
    return content


def _inside(folder: Path, name: str) -> Path:
    """The place of a file; a link that leads out of the folder is refused."""
    place = Path(os.path.realpath(folder / name))
    if not place.is_relative_to(os.path.realpath(folder)):
        must_be = f"a file in {folder}"
        raise CheckpointError(f"{folder / name}", must_be=must_be, got=f"a link to {place}")
    return place
