"""Keep a deployed classifier accurate when appearance and class frequencies shift at once.

Public names are listed in ``__init__.pyi``, which type checkers read too, and are imported when
they are first used, so ``import twoshift`` is light.
"""

from __future__ import annotations

import importlib
from typing import Any

from twoshift._lazy import homes

__version__ = "0.1.0"

_HOMES = homes(__file__)  # a sub-package comes from twoshift itself
__all__ = [name for name, home in _HOMES.items() if home != __name__]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOMES[name] == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
