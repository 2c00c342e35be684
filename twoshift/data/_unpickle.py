"""Read the pickles of old data sets without running any code in them.

A pickle can call any function by name. This reader allows only the few that rebuild a numpy array
and refuses all others. Numbers, strings, lists and dicts need no function.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from twoshift.errors import DataCorrupt

# numpy.core before numpy 2, numpy._core since: the function is the same
_RECONSTRUCT = np.ndarray(0).__reduce__()[0]


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", b"latin1"):
        raise _Refused(f"_codecs.encode to {encoding!r}")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode,  # how Python 3 writes bytes for Python 2
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> NoReturn:
        raise _Refused("a persistent id")


class _Refused(Exception):
    """A pickle names a function or class that is not allowed."""


def read_pickle(path: Path) -> Any:
    """Read the arrays and plain containers in a pickle; Python 2 strings become bytes.

    Args:
        path: Path of the pickle; anything but arrays and containers in it is an error, and not run.
    """
    try:
        with path.open("rb") as f:
            return _ArrayUnpickler(f, encoding="bytes").load()
    except _Refused as e:
        raise DataCorrupt(
            f"{path} tries to run {e}, which no data set needs; nothing was run",
            must_be="a pickle of numpy arrays and plain containers",
            cure="Do not trust this file: get the data set from its authors.",
        ) from None
    # which error a damaged pickle raises depends on the damaged byte
    except Exception as e:
        raise DataCorrupt(
            f"{path} is truncated or not a pickle: {e}", cure="Get the data set again."
        ) from e
