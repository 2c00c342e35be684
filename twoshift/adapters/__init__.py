"""Adapters of a classifier's head to a label distribution, one per file."""

from __future__ import annotations

from typing import Any

from twoshift.adapters._files import load_adapter, save_adapter
from twoshift.adapters.base import (
    AdaptedHead,
    Adapter,
    HeadShift,
    Scores,
    adapted_heads,
    adapters,
    attach,
    condition,
    detach,
    mapping_vector,
    score,
    shifted_logits,
    unbiased,
)
from twoshift.adapters.classwise import ClasswiseAdapter
from twoshift.adapters.identity import IdentityAdapter
from twoshift.adapters.label_shift import LabelShiftAdapter
from twoshift.adapters.logit import CalibratedAdapter, LogitAdapter, logit_adapter

__all__ = [
    "AdaptedHead",
    "Adapter",
    "CalibratedAdapter",
    "ClasswiseAdapter",
    "HeadShift",
    "IdentityAdapter",
    "LabelShiftAdapter",
    "LogitAdapter",
    "Scores",
    "adapted_heads",
    "adapters",
    "attach",
    "condition",
    "create",
    "detach",
    "load_adapter",
    "logit_adapter",
    "mapping_vector",
    "save_adapter",
    "score",
    "shifted_logits",
    "unbiased",
]


def create(name: str, features: int, classes: int, **settings: Any) -> Adapter:
    """Build the adapter registered under ``name``."""
    adapter: Adapter = adapters.create(name, features, classes, **settings)
    return adapter
