"""Test-time adaptation methods, one per file."""

from __future__ import annotations

from typing import Any

from torch import nn

from twoshift.methods.base import Method, methods
from twoshift.methods.bn_stats import BNStats
from twoshift.methods.iabn import IABN
from twoshift.methods.label_aware import LabelAware
from twoshift.methods.source import Source
from twoshift.methods.tent import Tent

__all__ = ["IABN", "BNStats", "LabelAware", "Method", "Source", "Tent", "create", "methods"]


def create(name: str, model: nn.Module, **settings: Any) -> Method:
    """Build a method around a copy of ``model``: ``create("tent", model, lr=1e-3)``."""
    method: Method = methods.create(name, model, **settings)
    return method
