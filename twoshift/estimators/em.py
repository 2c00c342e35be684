"""Maximum-likelihood label shift estimation by EM, with Dirichlet smoothing.

Saerens, Latinne and Decaestecker, "Adjusting the Outputs of a Classifier to New a Priori
Probabilities: A Simple Procedure", Neural Computation 2002.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from twoshift.estimators._window import Array, Calibrated, shares
from twoshift.estimators.base import estimators
from twoshift.registry import check_numbers

FRESH = 0.01  # share of uniform in a warm start: a class once at zero could not come back
_TINY = np.finfo(np.float64).tiny


@estimators.register("em")
class EM(Calibrated):
    """The label distribution that makes the last predictions most likely, by EM.

    Unlike an average of predictions, it is not biased towards the prior of the model, as long as
    the probabilities are calibrated.

    Args:
        classes: Number of classes.
        model_prior: Label distribution that the (calibrated) probabilities assume. Uniform, the
            default, is right for balanced softmax and after BCTS; a model trained with
            cross-entropy and not calibrated has that of its training set.
        temperature: T of the calibrated probabilities softmax(log p / T + bias).
        bias: Bias of the calibrated probabilities, one number per class; none by default.
        pseudo_count: Samples of every class to add to the window: a Dirichlet prior.
        window: Number of predictions to keep.
        max_steps: Largest number of EM steps per batch.
        tol: Stop when a step moves the distribution by less (sum of absolute changes).
    """

    def __init__(
        self,
        classes: int,
        model_prior: Sequence[float] | None = None,
        temperature: float = 1.0,
        bias: ArrayLike | Tensor | None = None,
        pseudo_count: float = 1.0,
        window: int = 512,
        max_steps: int = 1000,
        tol: float = 1e-6,
    ) -> None:
        super().__init__(classes, window, temperature, bias)
        self._model_prior, self.model_prior = shares("model_prior of em", model_prior, classes)
        check_numbers("em", "at least 0 and finite", pseudo_count=pseudo_count)
        check_numbers("em", "at least 1", max_steps=max_steps)
        check_numbers("em", "at least 0", tol=tol)
        self.pseudo_count, self.max_steps, self.tol = pseudo_count, max_steps, tol
        self.reset()

    def solve(self, rows: Array, before: Array) -> Array:
        """EM from the last estimate."""
        start = (1 - FRESH) * before + FRESH / self.classes
        ratios = rows / self._model_prior
        return em_prior(ratios, start, self.pseudo_count, self.max_steps, self.tol)


def em_prior(
    ratios: Array, start: Array, pseudo_count: float = 0.0, max_steps: int = 1000, tol: float = 1e-6
) -> Array:
    """The mode of the posterior of the label distribution, by EM.

    q <- (sum_i r_i + a) / (N + C a), r_i the normalised ratios_i * q.

    Args:
        ratios: Probabilities over the prior they assume, (N, C): likelihoods up to a factor.
        start: Where to begin; classes at 0 stay there unless there are pseudo-counts.
        pseudo_count: ``a``, the samples of every class to add.
        max_steps: Largest number of steps.
        tol: Stop when a step changes less.
    """
    total = len(ratios) + pseudo_count * len(start)
    q = start
    for _ in range(max_steps):
        shares = ratios.T @ (1 / np.maximum(ratios @ q, _TINY))
        new = (q * shares + pseudo_count) / total
        done = np.abs(new - q).sum() < tol
        q = new
        if done:
            break
    return q
