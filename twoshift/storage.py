"""Folders of safetensors and JSON: written atomically, checksummed, refused when damaged.

A *card* is a readable ``card.json`` with the SHA-256 of every file beside it and of itself.
Pickle is never used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twoshift.errors import CheckpointError, StorageError, TwoshiftError

if TYPE_CHECKING:
    from torch import Tensor

CARD = "card.json"
RESTORE = "Restore it or save again."


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextmanager
def storage_errors(what: str, path: Path) -> Iterator[None]:
    """Turn errors of the operating system into a StorageError that names the path."""
    try:
        yield
    except TwoshiftError:  # some are OSErrors, too, with a better message
        raise
    except OSError as e:
        cure = "Choose a folder that is writable and has enough space; nothing was changed."
        raise StorageError(f"{what} {path}: {e.strerror or e}", cure=cure) from e


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; it replaces ``path`` only if the block succeeds."""
    with storage_errors("cannot write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            with temporary.open("rb") as f:
                os.fsync(f.fileno())
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, keep_others: bool = True) -> Iterator[Path]:
    """Yield a temporary folder to fill; it replaces ``path`` only if the block succeeds.

    Files of an earlier save are removed; other files in the folder stay, unless ``keep_others`` is
    off.

    An existing folder is first moved aside, so a reader finds the old one or the new one. If the
    writer is killed between the two renames, the old one remains as ``.NAME.old``, where
    `saved_folder` finds it.
    """
    with storage_errors("cannot write", path):
        path = path.absolute()
        if Path.cwd().is_relative_to(path):
            what = f"{path} is the current working folder"
            raise StorageError(what, cure="Save to another folder.")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            yield temporary
            temporary.chmod(0o777 & ~_umask())
            if keep_others and path.exists():
                _keep_others(path, temporary)
            old = _aside(path)
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)
                path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _keep_others(old: Path, new: Path) -> None:
    """Link files from ``old`` into ``new``, except those that the card of ``old`` lists."""
    try:
        saved = {CARD, *json.loads((old / CARD).read_text())["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        saved = {CARD}
    for path in old.iterdir():
        target = new / path.name
        if path.name in saved or target.exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, target, symlinks=True, copy_function=_link)
        else:
            _link(path, target)


def _link(old: str | Path, new: str | Path) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:  # not every file system has hard links
        shutil.copy2(old, new, follow_symlinks=False)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def saved_folder(path: Path) -> Path:
    """``path``, or the place of its content if a writer was killed between two renames."""
    return _aside(path) if _aside(path).exists() and not path.exists() else path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically; NaN and infinity, which JSON does not have, are refused."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    with atomic_file(path) as temporary:
        temporary.write_text(text)


def write_card(folder: Path, content: Mapping[str, Any]) -> None:
    """Write ``card.json`` with the checksums of itself and of the files already in ``folder``."""
    files = {f.name: sha256(f) for f in sorted(folder.iterdir()) if f.name != CARD}
    card = {**content, "files": files}
    write_json(folder / CARD, {**card, "checksum": _digest(card)})


def read_card(folder: Path, kind: str) -> dict[str, Any]:
    """Read and check a card and the files it names.

    Args:
        folder: Folder that was saved.
        kind: Kind that the card must have, for example ``"source model"``.
    """
    folder = saved_folder(Path(folder).absolute())
    path = folder / CARD
    if not path.exists():
        raise CheckpointError(f"no {kind} in {folder}: {CARD} is missing", cure="Check the path.")
    try:
        card = json.loads(path.read_text())
        checksum = card.pop("checksum")
        files = card["files"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{path} is damaged: {e}", cure=RESTORE) from e
    if checksum != _digest(card):
        raise CheckpointError(f"{path} was edited: its checksum does not match", cure=RESTORE)
    if card.get("kind") != kind:
        raise CheckpointError(f"{folder}", must_be=f"a saved {kind}", got=card.get("kind"))
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing", cure=RESTORE)
        if sha256(file) != expected:
            what = f"{file} is truncated or edited: its SHA-256 differs from the card's"
            raise CheckpointError(what, cure=RESTORE)
    card["folder"] = folder
    return card


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Save tensors as safetensors, from contiguous copies on the CPU."""
    from safetensors.torch import save_file

    with atomic_file(path) as temporary:
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, temporary)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Load the tensors of a safetensors file on the CPU."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{path} is not a safetensors file: {e}") from e


def split_tensors(
    owner: str, values: Mapping[str, Any], separator: str = "/"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Values for a card, and the tensors among them, single or by name, as a flat dictionary."""
    import torch

    plain, tensors = {}, {}
    for name, value in values.items():
        path = f"{owner}{separator}{name}"
        if torch.is_tensor(value):
            tensors[path] = value
        elif isinstance(value, Mapping) and any(torch.is_tensor(v) for v in value.values()):
            tensors |= {f"{path}{separator}{part}": tensor for part, tensor in value.items()}
        else:
            plain[name] = value
    return plain, tensors


def join_tensors(
    owner: str, plain: Mapping[str, Any], tensors: Mapping[str, Tensor], separator: str = "/"
) -> dict[str, Any]:
    """The values of ``owner`` that `split_tensors` took apart."""
    values = dict(plain)
    for path, tensor in tensors.items():
        whose, name, *part = path.split(separator, 2)
        if whose == owner and part:
            values.setdefault(name, {})[part[0]] = tensor
        elif whose == owner:
            values[name] = tensor
    return values


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and bytes: equal only for tensors with equal bits."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        digest.update(t.reshape(-1).view(dtype=torch.uint8).numpy().data)
    return digest.hexdigest()
