"""Folders of safetensors and JSON: written atomically, checksummed, refused when damaged.

A *card* is a readable ``card.json`` that names the SHA-256 of every file beside it and of itself.
No pickle anywhere.
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


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextmanager
def storage_errors(what: str, path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into a StorageError that names the path."""
    try:
        yield
    except TwoshiftError:  # some are OSErrors too, and say more than we could
        raise
    except OSError as e:
        reason = e.strerror or str(e)
        raise StorageError(
            f"{what} {path}: {reason}",
            cure="Choose a folder you may write to, with enough room; nothing was changed.",
        ) from e


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Write to the yielded temporary path; it replaces ``path`` only if all went well."""
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
    """Fill the yielded temporary folder; it replaces ``path`` only if all went well.

    What was saved there before goes; other people's files stay, unless ``keep_others`` is off.

    An existing folder is moved aside first, so a reader finds the old one or the new one. Killed
    between the two renames, the old one is left as ``.NAME.old`` and is found by `read_card`.
    """
    with storage_errors("cannot write", path):
        path = path.absolute()
        if Path.cwd().is_relative_to(path):
            raise StorageError(
                f"{path} is the folder you work in", cure="Save to a folder of its own."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            yield temporary
            temporary.chmod(0o777 & ~_umask())
            if keep_others and path.exists():
                _keep_others(path, temporary)
            old = _set_aside(path)
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)
                path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _keep_others(old: Path, new: Path) -> None:
    """Link what somebody else put into ``old`` to ``new``: all but what its card names."""
    try:
        ours = {CARD, *json.loads((old / CARD).read_text())["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        ours = {CARD}
    for other in old.iterdir():
        target = new / other.name
        if other.name in ours or target.exists():
            continue
        if other.is_dir() and not other.is_symlink():
            shutil.copytree(other, target, symlinks=True, copy_function=_link)
        else:
            _link(other, target)


def _link(old: str | Path, new: str | Path) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:  # not every file system has hard links
        shutil.copy2(old, new, follow_symlinks=False)


def _set_aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path, value: Any) -> None:
    """Readable JSON, atomically; NaN and infinity are refused, they are not JSON."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    with atomic_file(path) as temporary:
        temporary.write_text(text)


def write_card(folder: Path, content: Mapping[str, Any]) -> None:
    """Write ``card.json`` beside the files already in ``folder``, with everybody's checksum."""
    files = {f.name: sha256(f) for f in sorted(folder.iterdir()) if f.name != CARD}
    card = {**content, "files": files}
    write_json(folder / CARD, {**card, "checksum": _digest(card)})


def read_card(folder: Path, kind: str) -> dict[str, Any]:
    """Read and check a card and the files it names.

    Args:
        folder: The saved folder.
        kind: What the card must say it is, for example ``"source model"``.
    """
    folder = Path(folder).absolute()
    if not folder.exists() and _set_aside(folder).exists():
        folder = _set_aside(folder)  # the writer was killed between two renames
    path = folder / CARD
    if not path.exists():
        raise CheckpointError(
            f"no {kind} in {folder}", must_be=f"a folder with {CARD}", cure="Check the path."
        )
    try:
        card = json.loads(path.read_text())
        checksum = card.pop("checksum")
        files = card["files"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{path} is damaged: {e}", cure="Restore it or save again.") from e
    if checksum != _digest(card):
        raise CheckpointError(
            f"{path} was edited: its checksum does not match", cure="Restore it or save again."
        )
    if card.get("kind") != kind:
        raise CheckpointError(f"{folder}", must_be=f"a saved {kind}", got=card.get("kind"))
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing", cure="Restore it or save again.")
        if sha256(file) != expected:
            raise CheckpointError(
                f"{file} is truncated or edited: its SHA-256 differs from the card's",
                cure="Restore it or save again.",
            )
    card["folder"] = folder
    return card


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Save tensors as safetensors (contiguous copies on the CPU)."""
    from safetensors.torch import save_file

    with atomic_file(path) as temporary:
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, temporary)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Load a safetensors file on the CPU."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{path} is not a safetensors file: {e}") from e


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes: equal only for bit-equal weights."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        digest.update(t.reshape(-1).view(dtype=_bytes()).numpy().data)
    return digest.hexdigest()


def _bytes() -> Any:
    import torch

    return torch.uint8
