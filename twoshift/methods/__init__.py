"""Test-time adaptation methods, one per file."""

from __future__ import annotations

from typing import Any

from torch import nn

from twoshift.methods._one_step import OneStep
from twoshift.methods.base import Method, methods
from twoshift.methods.bn_stats import BNStats
from twoshift.methods.cotta import CoTTA
from twoshift.methods.decoupled import Decoupled
from twoshift.methods.delta import DELTA
from twoshift.methods.eata import EATA
from twoshift.methods.iabn import IABN
from twoshift.methods.im_loss import IMLoss
from twoshift.methods.isfda import ISFDA
from twoshift.methods.label_aware import LabelAware
from twoshift.methods.lame import LAME
from twoshift.methods.matched import Matched, class_moments
from twoshift.methods.note import NOTE
from twoshift.methods.onda import ONDA
from twoshift.methods.pseudo_label import PseudoLabel
from twoshift.methods.rotta import RoTTA
from twoshift.methods.sar import SAR
from twoshift.methods.source import Source
from twoshift.methods.tent import Tent

__all__ = [
    "DELTA",
    "EATA",
    "IABN",
    "ISFDA",
    "LAME",
    "NOTE",
    "ONDA",
    "SAR",
    "BNStats",
    "CoTTA",
    "Decoupled",
    "IMLoss",
    "LabelAware",
    "Matched",
    "Method",
    "OneStep",
    "PseudoLabel",
    "RoTTA",
    "Source",
    "Tent",
    "class_moments",
    "create",
    "methods",
]


def create(name: str, model: nn.Module, **settings: Any) -> Method:
    """Build a method around a copy of ``model``: ``create("tent", model, lr=1e-3)``."""
    method: Method = methods.create(name, model, **settings)
    return method
