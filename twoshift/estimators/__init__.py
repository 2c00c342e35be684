"""Estimators of the target's label distribution, one per file."""

from __future__ import annotations

from typing import Any

from twoshift.estimators.base import PriorEstimator, estimators
from twoshift.estimators.bbse import BBSE
from twoshift.estimators.decayed_counts import DecayedCounts
from twoshift.estimators.em import EM
from twoshift.estimators.ema import EMA
from twoshift.estimators.fixed import Fixed
from twoshift.estimators.oracle import Oracle
from twoshift.estimators.readout import Readout
from twoshift.estimators.rlls import RLLS
from twoshift.estimators.tilt import Tilt

__all__ = [
    "BBSE",
    "EM",
    "EMA",
    "RLLS",
    "DecayedCounts",
    "Fixed",
    "Oracle",
    "PriorEstimator",
    "Readout",
    "Tilt",
    "create",
    "estimators",
]


def create(name: str, classes: int, **settings: Any) -> PriorEstimator:
    """Build the estimator registered under ``name``."""
    estimator: PriorEstimator = estimators.create(name, classes, **settings)
    return estimator
