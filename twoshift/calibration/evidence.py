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
UNSURE = 0.9  # temperature of a model that is more often right than it is sure


@dataclass(frozen=True)
class Reading:
    """Which label distribution the logits contain, and the evidence for it.

    Attributes:
        contains: ``"training"`` or ``"uniform"``: the reading that makes the labels more likely.
        training: Mean negative log-likelihood of the labels if the logits contain the training's
            label distribution.
        uniform: The same if they contain none.
        error: Standard error of the difference of the two.
    """

    contains: str
    training: float
    uniform: float
    error: float

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
    # a model that is always right is the more likely the surer it is, in both readings
    slopes = (SLOPES[0], 1.0 if _by_heart(z, y) else SLOPES[1])
    training = _log_likelihood(z, y, log_q - np.log(trained_on), slopes)
    uniform = _log_likelihood(z, y, log_q, slopes)
    difference = training - uniform
    return Reading(
        contains=TRAINING if difference.mean() > 0 else UNIFORM,
        training=float(-training.mean()),
        uniform=float(-uniform.mean()),
        error=_standard_error(difference),
    )


def looks_trained_on(logits: Tensor, labels: Tensor, temperature: float, bias: Tensor) -> bool:
    """Whether a model was probably trained on these images.

    It is nearly always right and sure of it; or more often right than it is sure, which the
    calibration shows by a temperature that is clearly below 1. Of images that are new to it, a
    model is too sure rather than not sure enough.

    Args:
        logits: Raw outputs of the model, (N, classes).
        labels: The true classes, (N,).
        temperature: The temperature that calibrates the logits.
        bias: The bias of the same calibration.
    """
    z, y = logits.detach().cpu().double().numpy(), labels.cpu().numpy()
    if _by_heart(z, y):
        return True
    if temperature >= UNSURE:
        return False
    offset = bias.numpy() + np.log(np.bincount(y, minlength=z.shape[1]) / len(y))
    surer = _label_scores(z / temperature + offset, y) - _label_scores(z + offset, y)
    return bool(surer.mean() > SURE * _standard_error(surer))


def _log_likelihood(z: Array, y: Labels, offset: Array, slopes: tuple[float, float]) -> Array:
    """Of every label under softmax(slope * z + offset), for the best slope."""
    best = minimize_scalar(
        lambda t: -_label_scores(z * np.exp(t) + offset, y).mean(),
        bounds=np.log(slopes),
        method="bounded",
    )
    return _label_scores(z * np.exp(best.x) + offset, y)


def _label_scores(scores: Array, y: Labels) -> Array:
    """The log-softmax of every row at its label."""
    top = scores.max(1)
    return scores[np.arange(len(y)), y] - top - np.log(np.exp(scores - top[:, None]).sum(1))


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
