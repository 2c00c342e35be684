"""Cards: the readable ``card.json`` of a saved folder, checked before anything is made of it.

A card has a ``kind``, fields of that kind, the ``files`` beside it by name, each with its SHA-256,
and the ``checksum`` of all this. The fields are described by a dataclass or a pydantic model.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from twoshift.errors import CheckpointError, TwoshiftError

CARD = "card.json"
RESTORE = "Restore it or save again."
LARGEST = 64 << 20  # bytes; states of 0.1.0 have tensors as lists in them
DEEPEST = 32  # levels of nesting
MOST_FILES = 64
# what wrong numbers and texts may lead to
MISFITS = (
    TwoshiftError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
T = TypeVar("T", bound=type)

# no folders, nothing hidden, no "..": a card may name only what lies beside it
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class File(BaseModel):
    """A file that a card lists."""

    model_config = ConfigDict(strict=True)
    file: FileName
    sha256: Digest


class Fields(BaseModel):
    """What the cards of every kind have."""

    model_config = ConfigDict(strict=True)
    kind: str
    # 0.1.0 had fixed names, and the digest alone
    files: Annotated[dict[FileName, File | Digest], Field(max_length=MOST_FILES)]
    checksum: Digest


_KINDS: dict[str, type] = {}


def card_of(kind: str) -> Callable[[T], T]:
    """Decorator: a dataclass or pydantic model that describes the fields of cards of a kind."""

    def register(fields: T) -> T:
        _KINDS[kind] = fields
        return fields

    return register


@cache
def _validator(fields: type) -> TypeAdapter[Any]:
    return TypeAdapter(fields)


def make_card(kind: str, content: Mapping[str, Any], files: Mapping[str, File]) -> bytes:
    """The bytes of a card."""
    listed = {name: file.model_dump() for name, file in files.items()}
    card = {"kind": kind, **content, "files": listed}
    return (json.dumps({**card, "checksum": checksum(card)}, indent=2, allow_nan=False)).encode()


def checksum(card: Mapping[str, Any]) -> str:
    """SHA-256 of what a card says."""
    return hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()


def parse_card(raw: bytes, path: Path, kind: str | None = None) -> dict[str, Any]:
    """A card as a dictionary, without its checksum; one that is malformed is refused.

    Args:
        raw: Content of the file.
        path: Where it was read, for messages.
        kind: Kind that the card must have; None for any.
    """
    card = _parsed(raw, path)
    if not isinstance(card, dict) or "checksum" not in card or "files" not in card:
        raise CheckpointError(f"{path} is damaged: it has no checksums", cure=RESTORE)
    claimed = card.pop("checksum")
    if claimed != checksum(card):
        raise CheckpointError(f"{path} was edited: its checksum does not match", cure=RESTORE)
    if kind is not None and card.get("kind") != kind:
        got = _short(card.get("kind"), quoted=False)
        raise CheckpointError(f"{path.parent}", must_be=f"a saved {kind}", got=got)
    _check(raw, path, Fields)
    if fields := _KINDS.get(card["kind"]):
        _check(raw, path, fields)
    return card


def files_of(card: Mapping[str, Any]) -> dict[str, File]:
    """The files that a checked card lists, by name."""
    files = card["files"]
    return {
        # of 0.1.0: a file is named as it is called
        (Path(name).stem if isinstance(file, str) else name): (
            File(file=name, sha256=file) if isinstance(file, str) else File(**file)
        )
        for name, file in files.items()
    }


@contextmanager
def misfits(
    folder: str | Path, cure: str = RESTORE, *, foreign_only: bool = False
) -> Iterator[None]:
    """Say of what goes wrong inside that a folder does not fit its own card.

    Args:
        folder: The folder.
        cure: What to do about it.
        foreign_only: Let errors of twoshift pass as they are.
    """
    try:
        yield
    except MISFITS as e:
        if foreign_only and isinstance(e, TwoshiftError):
            raise
        reason = f"{e.args[0]} is missing" if type(e) is KeyError else str(e) or repr(e)
        what = f"{folder} does not fit its own card: {reason.rstrip('.')}"
        raise CheckpointError(what, cure=cure) from e


def _parsed(raw: bytes, path: Path) -> Any:
    if len(raw) > LARGEST:
        raise CheckpointError(f"{path}", must_be=f"at most {LARGEST} bytes", cure=RESTORE)
    try:
        value = json.loads(raw.decode(), parse_constant=_refuse_constant)
        _check_values(value)
    except (ValueError, RecursionError, MemoryError) as e:
        raise CheckpointError(f"{path} is damaged: {e}", cure=RESTORE) from e
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _check_values(value: Any) -> None:
    """Refuse what Python's JSON lets through: deep nesting, infinity, endless integers."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
                inner += item.keys()
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str):
                item.encode()  # half of a surrogate pair could not even be printed
            elif isinstance(item, int) and abs(item) >= 1 << 64:
                raise ValueError("an integer has more than 64 bits")
            elif isinstance(item, float) and not math.isfinite(item):
                raise ValueError("a number is infinite")
        level = inner


def _check(raw: bytes, path: Path, fields: type) -> None:
    try:
        _validator(fields).validate_json(raw, strict=True)
    except ValidationError as e:
        first, *others = e.errors(include_url=False)
        # one error for each type that a value might have had
        same = [first, *(error for error in others if error["input"] is first["input"])]
        where = ".".join(map(str, first["loc"][:-1] if len(same) > 1 else first["loc"]))
        missing = first["type"] == "missing"
        reasons = dict.fromkeys(re.sub("^.*should (be|have) ", "", error["msg"]) for error in same)
        raise CheckpointError(
            f"{path} is malformed: {_short(where, quoted=False)}",
            must_be="given" if missing else " or ".join(reasons),
            got="nothing" if missing else _short(first["input"]),
            cure=RESTORE,
        ) from e


def _short(value: object, quoted: bool = True) -> str:
    text = repr(value) if quoted else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
