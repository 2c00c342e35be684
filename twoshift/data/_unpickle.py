"""Read the pickles of old data sets without running anything in them.

A pickle is a program. This reader follows only the instructions that make plain values, and takes
note of the calls that rebuild a numpy array instead of making them: neither Python's nor numpy's
unpickling is involved, and the array is made here, from checked bytes of a checked integer type.
"""

from __future__ import annotations

import io
import math
import pickletools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twoshift.errors import DataCorrupt, DataMissing

MOST_BYTES = 1 << 29  # the largest official file has 155 MB
MOST_INSTRUCTIONS = 2_000_000  # of which it has some 200,000
ENCODE, ARRAY, NDARRAY, DTYPE = "_codecs.encode", "array", "numpy.ndarray", "numpy.dtype"
_NAMES = {  # numpy.core before numpy 2, numpy._core since
    "numpy.core.multiarray._reconstruct": ARRAY,
    "numpy._core.multiarray._reconstruct": ARRAY,
    **{name: name for name in (NDARRAY, DTYPE, ENCODE)},
}
_TYPES = {("u1", "|"), ("i1", "|"), ("i4", "<"), ("i8", "<")}  # code and byte order
_FIXED = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
_OLD_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}  # Python 2's, which are bytes
_BYTES = {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_TEXT = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_PUT, _GET = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}


class _Forbidden(Exception):
    """A pickle names a function or class that is not allowed."""


class _Wrong(Exception):
    """What a pickle has in it that a data set has not."""


@dataclass(frozen=True)
class _Name:
    """An allowed function or class, which is not looked up."""

    name: str


@dataclass(eq=False)
class _Call:
    """A call that was not made, and the state that was to be set on its result."""

    function: str
    arguments: tuple[Any, ...]
    state: tuple[Any, ...] | None = None


@dataclass
class _Reader:
    """The stack machine of a pickle, reduced to plain values, names and calls."""

    bytes_left: int  # that may come from text, which can be repeated at no cost
    stack: list[Any] = field(default_factory=list)
    marked: list[list[Any]] = field(default_factory=list)  # the stacks below the marks
    memo: dict[int, Any] = field(default_factory=dict)

    def follow(self, instruction: str, argument: Any) -> None:
        if instruction in _FIXED:
            self.stack.append(_FIXED[instruction])
        elif instruction in _NUMBERS:
            if isinstance(argument, int) and argument.bit_length() > 63:
                raise _Wrong("a number of more than 64 bits")
            self.stack.append(argument)
        elif instruction in _OLD_STRINGS:
            self.stack.append(argument.encode("latin1"))
        elif instruction in _BYTES or instruction in _TEXT:
            self.stack.append(argument)
        elif instruction in _PUT:
            self.memo[argument] = self.stack[-1]
        elif instruction in _GET:
            self.stack.append(self.memo[argument])
        elif instruction in _TUPLES:
            items = [self.stack.pop() for _ in range(_TUPLES[instruction])]
            self.stack.append(tuple(items[::-1]))
        elif (follow := getattr(self, f"_{instruction.lower()}", None)) is not None:
            follow(*([] if argument is None else [argument]))
        elif instruction in ("PERSID", "BINPERSID"):
            raise _Forbidden("a persistent id")
        else:
            raise _Forbidden(f"the instruction {instruction}")

    def _proto(self, version: int) -> None:
        if version > 5:
            raise _Wrong(f"protocol {version}")

    def _frame(self, length: int) -> None:
        pass

    def _mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def _items(self) -> list[Any]:
        """What is above the last mark."""
        items, self.stack = self.stack, self.marked.pop()
        return items

    def _pop(self) -> None:
        self.stack.pop()

    def _pop_mark(self) -> None:
        self._items()

    def _dup(self) -> None:
        self.stack.append(self.stack[-1])

    def _memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _tuple(self) -> None:
        items = tuple(self._items())
        self.stack.append(items)

    def _empty_list(self) -> None:
        self.stack.append([])

    def _list(self) -> None:
        items = self._items()
        self.stack.append(items)

    def _append(self) -> None:
        self._extend([self.stack.pop()])

    def _appends(self) -> None:
        self._extend(self._items())

    def _extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise _Wrong("items for something that is no list")
        self.stack[-1].extend(items)

    def _empty_dict(self) -> None:
        self.stack.append({})

    def _dict(self) -> None:
        items = self._items()
        self.stack.append({})
        self._set(items)

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _setitems(self) -> None:
        self._set(self._items())

    def _set(self, items: list[Any]) -> None:
        # only text and bytes: the hash of a deep tuple would exhaust the stack of the process
        if not isinstance(self.stack[-1], dict) or len(items) % 2:
            raise _Wrong("keys and values that do not fit")
        if not all(isinstance(key, str | bytes) for key in items[::2]):
            raise _Wrong("a key that is not text")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _global(self, name: str) -> None:
        self._name(name.replace(" ", ".", 1))

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise _Wrong("a name that is not text")
        self._name(f"{module}.{name}")

    def _name(self, name: str) -> None:
        if name not in _NAMES:
            raise _Forbidden(name[:100])
        self.stack.append(_Name(_NAMES[name]))

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise _Wrong("a call of something that is no function")
        if function.name == ENCODE:
            self.stack.append(self._encoded(arguments))
        else:
            self.stack.append(_Call(function.name, arguments))

    def _encoded(self, arguments: tuple[Any, ...]) -> bytes:
        """How Python 3 writes bytes for Python 2."""
        match arguments:
            case (str() as text, "latin1" | b"latin1"):
                self.bytes_left -= len(text)
                if self.bytes_left < 0:
                    raise _Wrong("more bytes than the file has")
                return text.encode("latin1")
            case (_, str() | bytes() as encoding):
                raise _Forbidden(f"{ENCODE} to {str(encoding)[:20]!r}")
        raise _Wrong("bytes that are no text")

    def _build(self) -> None:
        state, call = self.stack.pop(), self.stack[-1]
        if not isinstance(call, _Call) or call.state is not None or not isinstance(state, tuple):
            raise _Wrong("a state for something that has none")
        call.state = state


def read_pickle(path: Path) -> dict[str | bytes, Any]:
    """Read a pickled dictionary of integer arrays, lists of plain values and plain values.

    Python 2 strings become bytes. Anything else in the file is an error, and not run.

    Args:
        path: Path of the pickle.
    """
    try:
        content = _content(path)
        reader = _Reader(len(content))
        for count, (instruction, argument, _) in enumerate(pickletools.genops(io.BytesIO(content))):
            if count > MOST_INSTRUCTIONS:
                raise _Wrong(f"more than {MOST_INSTRUCTIONS:,} instructions")
            if instruction.name == "STOP":
                break
            reader.follow(instruction.name, argument)
        return _finished(reader)
    except FileNotFoundError as e:
        raise DataMissing(f"{path} does not exist", cure="Check the path.") from e
    except _Forbidden as e:
        raise DataCorrupt(
            f"{path} tries to run {e}, which no data set needs; nothing was run",
            must_be="a pickle of numpy arrays and plain containers",
            cure="Do not trust this file: get the data set from its authors.",
        ) from None
    except _Wrong as e:
        must_be = "a dictionary of integer arrays, lists and plain values"
        what = f"{path} is a pickle of something else: {e}"
        raise DataCorrupt(what, must_be=must_be, cure="Get the data set again.") from None
    # which error a damaged pickle raises depends on the damaged byte
    except Exception as e:
        what = f"{path} is truncated or not a pickle: {str(e)[:200] or type(e).__name__}"
        raise DataCorrupt(what, cure="Get the data set again.") from e


def _content(path: Path) -> bytes:
    """All of the file, so that no instruction can ask for more than there is."""
    if path.stat().st_size > MOST_BYTES:
        raise _Wrong(f"more than {MOST_BYTES:,} bytes")
    return path.read_bytes()


def _finished(reader: _Reader) -> dict[str | bytes, Any]:
    match reader.marked, reader.stack:
        case [], [dict() as content]:
            return {key: _value(value) for key, value in content.items()}
    raise _Wrong("no dictionary, or more than one value")


def _value(value: Any) -> Any:
    if isinstance(value, _Call):
        return _array(value)
    values = value if isinstance(value, list) else [value]
    # nothing nested: a few bytes of it could stand for endlessly many values
    if not all(isinstance(x, int | float | str | bytes | None) for x in values):
        raise _Wrong("containers in containers")
    return value


def _array(call: _Call) -> NDArray[np.integer[Any]]:
    match call.function, call.arguments, call.state:
        case (
            str(function),
            (_Name(kind), (0,), "b" | b"b"),
            (1, tuple(shape), _Call() as dtype, bool() | 0 | 1 as column_major, bytes(content)),
        ) if (function, kind) == (ARRAY, NDARRAY):
            code = _type(dtype)
            if not all(type(size) is int and size > 0 for size in shape) or len(shape) > 8:
                raise _Wrong("an array of an impossible shape")
            if math.prod(shape) * code.itemsize != len(content):
                raise _Wrong("an array whose shape does not fit its bytes")
            return np.frombuffer(content, code).reshape(shape, order="F" if column_major else "C")
    raise _Wrong("something that looks like an array, but is none")


def _type(call: _Call) -> np.dtype[Any]:
    match call.function, call.arguments, call.state:
        case (
            "numpy.dtype",
            (str() | bytes() as code, _, _),
            (3, str() | bytes() as order, None, None, None, -1, -1, 0),
        ):
            name, sign = (x if isinstance(x, str) else x.decode("latin1") for x in (code, order))
            if (name, sign) in _TYPES:
                return np.dtype(sign + name)
    raise _Wrong("an array of something else than integers")
