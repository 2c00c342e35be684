"""Saved folders as tests need them: edited with matching checksums, or as 0.1.0 wrote them."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from twoshift.storage import saved_files


def names(folder: Path) -> list[str]:
    """Names of all files in a folder, sorted."""
    return sorted(p.name for p in folder.iterdir())


def card_in(folder: Path) -> dict[str, Any]:
    """The card of a saved folder, without its checksum."""
    card = json.loads((folder / "card.json").read_text())
    card.pop("checksum")
    return card


def refit(folder: Path, card: dict[str, Any]) -> None:
    """Write a card with the right checksums of itself and of the files that it lists."""
    files = card["files"] if isinstance(card.get("files"), dict) else {}
    for name, file in files.items():
        listed: Any = file.get("file") if isinstance(file, dict) else name
        with suppress(OSError, TypeError, ValueError):  # what is listed may be anything
            if (folder / listed).is_file():
                digest = hashlib.sha256((folder / listed).read_bytes()).hexdigest()
                files[name] = {**file, "sha256": digest} if isinstance(file, dict) else digest
    checksum = hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()
    (folder / "card.json").write_text(json.dumps({**card, "checksum": checksum}, indent=2))


def change(folder: Path, **fields: Any) -> None:
    """Change fields of a card; ``...`` takes one away."""
    card = {**card_in(folder), **fields}
    refit(folder, {name: value for name, value in card.items() if value is not ...})


def as_first_version(folder: Path) -> None:
    """Give the files of a saved folder the fixed names that they had in 0.1.0."""
    card, files = card_in(folder), {}
    for name, path in saved_files(folder).items():
        files[path.rename(folder / f"{name}.safetensors").name] = ""
    refit(folder, {**card, "files": files})
