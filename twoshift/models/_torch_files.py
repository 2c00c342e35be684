"""Checks of a file of ``torch.save`` that come before torch reads it.

torch runs no code of an untrusted file, but would unpack any amount of it, and can be made to
exhaust the stack of the process by tuples in tuples.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from pathlib import Path

from twoshift.errors import CheckpointError

MOST_BYTES = 1 << 26  # of the pickle, which has names and shapes only
DEEPEST = 50  # tuples in tuples; torch's own have three
OLD_PICKLES = 5  # at the start of a file in the old format, before the tensors
CURE = "Save it again: torch.save(model.state_dict(), path)."
_CHANGES = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"}
_PUT, _GET = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}


def check_torch_file(path: Path) -> None:
    """Refuse a file that unpacks to more than it is, or nests tuples without end.

    A damaged file is an error of `zipfile` or `pickletools`, of any kind.
    """
    size = path.stat().st_size
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            start = io.BytesIO(file.read(MOST_BYTES))
        for _ in range(OLD_PICKLES):
            _check_depth(path, start)
        return
    with zipfile.ZipFile(path) as content:
        members = content.infolist()
        unpacked = sum(member.file_size for member in members)
        if unpacked > size:  # torch itself does not compress
            must_be, got = f"at most the size of the file, {size:,} bytes", f"{unpacked:,} bytes"
            what = f"{path} is compressed: its content"
            raise CheckpointError(what, must_be=must_be, got=got, cure=CURE)
        for member in members:
            if member.filename.endswith(".pkl"):
                with content.open(member) as pickle:
                    _check_depth(path, io.BytesIO(pickle.read(MOST_BYTES)))


def _check_depth(path: Path, pickle: io.BytesIO) -> None:
    """Follow the stack of a pickle, of which only the depth of its tuples is kept."""
    stack: list[int | None] = []  # None is a mark
    memo: dict[int, int] = {}
    for instruction, argument, _ in pickletools.genops(pickle):
        name, before = instruction.name, list(instruction.stack_before)
        if name in _PUT or name == "MEMOIZE":
            memo[len(memo) if argument is None else argument] = stack[-1] or 0
            continue
        if name in _GET:
            stack.append(memo[argument or 0])
            continue
        taken: list[int] = []
        if pickletools.markobject in before:
            while (depth := stack.pop()) is not None:
                taken.append(depth)
            before = before[: before.index(pickletools.markobject)]
        taken += [stack.pop() or 0 for _ in before]
        # what is changed later cannot be hashed, which is where the stack is exhausted
        depth = 0 if name in _CHANGES else max((1 + depth for depth in taken), default=0)
        if depth > DEEPEST:
            must_be = f"a state_dict, of at most {DEEPEST} tuples in each other"
            raise CheckpointError(f"{path}", must_be=must_be, cure=CURE)
        stack += [None if name == "MARK" else depth for _ in instruction.stack_after]
