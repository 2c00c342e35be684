"""What the logits of a classifier contain, found out from labelled images.

A classifier trained by plain cross-entropy prefers the classes that were frequent in its training:
its logits contain the log of the training's label distribution. One trained for equally frequent
classes (balanced softmax, class weights, balanced sampling) does not. Which of the two it is
decides how its predictions are to be adjusted, and shows in the likelihood of labelled images under
both readings:

- *training*: log p(y | x) = z / T - log pi + log q + const, pi the label distribution of the
  training and q that of the given images;
- *uniform*: log p(y | x) = z / T + log q + const.

Each reading has a temperature of its own, by greatest likelihood.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from torch import Tensor

from twoshift.estimators._bcts import SLOPES
from twoshift.priors import Prior

Array = NDArray[np.float64]
Labels = NDArray[np.int64]

TRAINING, UNIFORM = "training", "uniform"
SURE = 3.0  # standard errors by which a reading must be ahead
NEARLY_EQUAL = 1.2  # largest over smallest share of labels that count as equally frequent
BY_HEART = 0.98  # accuracy and confidence on images that were learnt by heart
UNSURE = 0.92  # temperature of a model that is more often right than it is sure


@dataclass(frozen=True)
class Reading:
    """Which label distribution the logits contain, and the evidence for it.

    Attributes:
        contains: ``"training"`` or ``"uniform"``: the reading that makes the labels more likely.
        training: Mean negative log-likelihood of the labels if the logits contain the training's
            label distribution.
        uniform: The same if they contain none.
        error: Standard error of the difference of the two.
        temperature: The temperature of greatest likelihood, in the better reading.
        trained_on: Whether the model was probably trained on these images: it is nearly always
            right and sure, or clearly more often right than it is sure. Of new images, a model is
            too sure rather than not sure enough.
    """

    contains: str
    training: float
    uniform: float
    error: float
    temperature: float
    trained_on: bool

    @property
    def lead(self) -> float:
        """Standard errors by which the reading is ahead of the other one."""
        difference = abs(self.training - self.uniform)
        return difference / self.error if self.error > 0 else 0.0

    @property
    def sure(self) -> bool:
        """Whether the evidence decides."""
        return self.lead >= SURE

    def __str__(self) -> str:
        """The evidence in a line."""
        return (
            f"negative log-likelihood {self.training:.4f} if the logits contain the training's "
            f"label distribution, {self.uniform:.4f} if they contain none "
            f"({self.lead:.1f} standard errors apart)"
        )


def read_prior(logits: Tensor, labels: Tensor, trained_on: Prior) -> Reading:
    """Find out whether logits contain the label distribution of the training.

    Args:
        logits: Raw outputs of the model, (N, classes).
        labels: The true classes, (N,); every class must occur.
        trained_on: Label distribution of the training images.
    """
    z, y = logits.detach().cpu().double().numpy(), labels.cpu().numpy()
    log_q = np.log(np.bincount(y, minlength=z.shape[1]) / len(y))
    by_heart = _by_heart(z, y)
    # a model that is always right is the more likely the surer it is, in both readings
    slopes = (SLOPES[0], 1.0 if by_heart else SLOPES[1])
    readings = {
        TRAINING: _Fit(z, y, log_q - np.log(trained_on), slopes),
        UNIFORM: _Fit(z, y, log_q, slopes),
    }
    fits = {name: fit.log_likelihood(fit.slope) for name, fit in readings.items()}
    difference = fits[TRAINING] - fits[UNIFORM]
    contains = TRAINING if difference.mean() > 0 else UNIFORM
    best = readings[contains]
    surer = fits[contains] - best.log_likelihood(1.0)
    unsure = 1 / best.slope < UNSURE and surer.mean() > SURE * _standard_error(surer)
    return Reading(
        contains=contains,
        training=float(-fits[TRAINING].mean()),
        uniform=float(-fits[UNIFORM].mean()),
        error=_standard_error(difference),
        temperature=1 / best.slope,
        trained_on=by_heart or bool(unsure),
    )


class _Fit:
    """The slope that makes labels most likely under softmax(slope * z + offset)."""

    def __init__(self, z: Array, y: Labels, offset: Array, slopes: tuple[float, float]) -> None:
        self._z, self._y, self._offset = z, y, offset
        best = minimize_scalar(
            lambda t: -self.log_likelihood(np.exp(t)).mean(),
            bounds=np.log(slopes),
            method="bounded",
        )
        self.slope = float(np.exp(best.x))

    def log_likelihood(self, slope: float) -> Array:
        """Of every label."""
        s = self._z * slope + self._offset
        top = s.max(1)
        right = s[np.arange(len(s)), self._y]
        return right - top - np.log(np.exp(s - top[:, None]).sum(1))


def _standard_error(values: Array) -> float:
    return float(values.std() / np.sqrt(len(values)))


def _by_heart(z: Array, y: Labels) -> bool:
    """Whether a model is always right, and sure of it."""
    confidence = 1 / np.exp(z - z.max(1, keepdims=True)).sum(1)
    return bool((z.argmax(1) == y).mean() >= BY_HEART and confidence.mean() >= BY_HEART)


def nearly_equal(counts: NDArray[np.int64]) -> bool:
    """Whether labels with these counts look equally frequent, up to the luck of a random draw."""
    if counts.max() <= NEARLY_EQUAL * counts.min():
        return True
    expected, freedom = counts.mean(), len(counts) - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return bool(chi_square <= freedom + 3 * np.sqrt(2 * freedom))
