"""Facts of a source model: computed once, saved with it, handed out by parameter name."""

from __future__ import annotations

from twoshift.calibration.base import Calibration as Calibration
from twoshift.calibration.base import calibration_from as calibration_from
from twoshift.calibration.base import calibration_of as calibration_of
from twoshift.calibration.base import known_facts as known_facts
from twoshift.calibration.base import load_calibration as load_calibration
from twoshift.calibration.base import save_calibration as save_calibration
from twoshift.calibration.classifier import Classifier as Classifier
from twoshift.calibration.cross_fitting import crossfit as crossfit
from twoshift.calibration.dart import fit_dart as fit_dart
from twoshift.calibration.facts import Predictions as Predictions
from twoshift.calibration.facts import hand_out as hand_out
from twoshift.calibration.fit import calibrate as calibrate
