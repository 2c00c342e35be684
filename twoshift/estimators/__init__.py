"""Estimators of the target's label distribution, one per file.

Names are listed in ``__init__.pyi`` and imported when the first of them is used: the arithmetic
of `Paced` needs no torch, and is also used where there is none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from twoshift._lazy import homes

if TYPE_CHECKING:
    from twoshift.estimators.base import PriorEstimator

_HOMES = {name: home for name, home in homes(__file__).items() if home.startswith(__name__)}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = {home: importlib.import_module(home) for home in _HOMES.values()}  # all register
    return getattr(modules[_HOMES[name]], name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "create"])


def create(name: str, classes: int, **settings: Any) -> PriorEstimator:
    """Build the estimator registered under ``name``."""
    estimator: PriorEstimator = __getattr__("estimators").create(name, classes, **settings)
    return estimator
