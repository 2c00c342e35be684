"""Facts of a source model: computed once, saved with it, handed out by parameter name."""

from __future__ import annotations

from twoshift.calibration.base import (
    Calibration,
    calibration_from,
    calibration_of,
    known_facts,
    load_calibration,
    save_calibration,
)
from twoshift.calibration.cross_fitting import crossfit
from twoshift.calibration.facts import Predictions, hand_out

__all__ = [
    "Calibration",
    "Predictions",
    "calibration_from",
    "calibration_of",
    "crossfit",
    "hand_out",
    "known_facts",
    "load_calibration",
    "save_calibration",
]
