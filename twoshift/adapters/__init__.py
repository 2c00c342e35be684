"""Adapters of a classifier's head to a label distribution, one per file."""

from __future__ import annotations

from twoshift.adapters.base import (
    FLOOR,
    FORMS,
    AdaptedHead,
    HeadShift,
    LabelShiftAdapter,
    adapted_heads,
    attach,
    condition,
    detach,
    load_adapter,
    logit_adapter,
    mapping_vector,
    save_adapter,
    shifted_logits,
)

__all__ = [
    "FLOOR",
    "FORMS",
    "AdaptedHead",
    "HeadShift",
    "LabelShiftAdapter",
    "adapted_heads",
    "attach",
    "condition",
    "detach",
    "load_adapter",
    "logit_adapter",
    "mapping_vector",
    "save_adapter",
    "shifted_logits",
]
