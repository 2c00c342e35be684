"""Keep a deployed classifier accurate when appearance and class frequencies shift at once.

Public names are imported when they are first used, so ``import twoshift`` is light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from twoshift.adapters import (
        Adapter,
        CalibratedAdapter,
        ClasswiseAdapter,
        IdentityAdapter,
        LabelShiftAdapter,
        LogitAdapter,
        attach,
        condition,
        detach,
        load_adapter,
        logit_adapter,
        save_adapter,
    )
    from twoshift.errors import TwoshiftError
    from twoshift.estimators import BBSE, EM, EMA, RLLS, DecayedCounts, Fixed, Oracle, Readout, Tilt
    from twoshift.methods import (
        DELTA,
        EATA,
        IABN,
        ISFDA,
        LAME,
        NOTE,
        ONDA,
        SAR,
        BNStats,
        CoTTA,
        Decoupled,
        IMLoss,
        LabelAware,
        Matched,
        Method,
        PseudoLabel,
        RoTTA,
        Tent,
        class_moments,
    )
    from twoshift.recommend import recommended
    from twoshift.train.adapter import fit_adapter

_HOMES = {
    "Adapter": "adapters",
    "CalibratedAdapter": "adapters",
    "ClasswiseAdapter": "adapters",
    "IdentityAdapter": "adapters",
    "LabelShiftAdapter": "adapters",
    "LogitAdapter": "adapters",
    "attach": "adapters",
    "condition": "adapters",
    "detach": "adapters",
    "load_adapter": "adapters",
    "logit_adapter": "adapters",
    "save_adapter": "adapters",
    "TwoshiftError": "errors",
    "BBSE": "estimators",
    "EM": "estimators",
    "DecayedCounts": "estimators",
    "EMA": "estimators",
    "Fixed": "estimators",
    "Oracle": "estimators",
    "RLLS": "estimators",
    "Readout": "estimators",
    "Tilt": "estimators",
    "BNStats": "methods",
    "CoTTA": "methods",
    "DELTA": "methods",
    "Decoupled": "methods",
    "EATA": "methods",
    "IABN": "methods",
    "IMLoss": "methods",
    "ISFDA": "methods",
    "LAME": "methods",
    "LabelAware": "methods",
    "Matched": "methods",
    "Method": "methods",
    "NOTE": "methods",
    "ONDA": "methods",
    "PseudoLabel": "methods",
    "RoTTA": "methods",
    "SAR": "methods",
    "Tent": "methods",
    "class_moments": "methods",
    "recommended": "recommend",
    "fit_adapter": "train.adapter",
}
_ROOMS = (
    "adapters",
    "bench",
    "calibration",
    "data",
    "estimators",
    "methods",
    "metrics",
    "models",
    "priors",
    "report",
    "train",
)

__all__ = [
    "BBSE",
    "DELTA",
    "EATA",
    "EM",
    "EMA",
    "IABN",
    "ISFDA",
    "LAME",
    "NOTE",
    "ONDA",
    "RLLS",
    "SAR",
    "Adapter",
    "BNStats",
    "CalibratedAdapter",
    "ClasswiseAdapter",
    "CoTTA",
    "DecayedCounts",
    "Decoupled",
    "Fixed",
    "IMLoss",
    "IdentityAdapter",
    "LabelAware",
    "LabelShiftAdapter",
    "LogitAdapter",
    "Matched",
    "Method",
    "Oracle",
    "PseudoLabel",
    "Readout",
    "RoTTA",
    "Tent",
    "Tilt",
    "TwoshiftError",
    "attach",
    "class_moments",
    "condition",
    "detach",
    "fit_adapter",
    "load_adapter",
    "logit_adapter",
    "recommended",
    "save_adapter",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"twoshift.{_HOMES[name]}"), name)
    if name in _ROOMS:
        return importlib.import_module(f"twoshift.{name}")
    raise AttributeError(f"module 'twoshift' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "__version__"])
