"""Regularised learning under label shift: black box estimation that mistrusts small samples.

Azizzadenesheli, Liu, Yang and Anandkumar, "Regularized Learning for Domain Adaptation under Label
Shifts", ICLR 2019, https://arxiv.org/abs/1903.09734.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq, nnls
from torch import Tensor

from twoshift.errors import SettingError
from twoshift.estimators._window import Array
from twoshift.estimators.base import estimators
from twoshift.estimators.bbse import BBSE

SHARE, DOUBT = 0.01, 0.05  # as the authors: a hundredth of the bound that holds with 95 %
_RIDGE = (1e-14, 1e4)
_TINY = np.finfo(np.float64).tiny


@estimators.register("rlls")
class RLLS(BBSE):
    """Black box estimation with weights pulled towards 1, the more the fewer source images.

    The weights are 1 + theta with the theta that minimises
    ``|C theta - (mu - mu_s)| + rho |theta|`` over theta >= -1. mu_s, the mean prediction on the
    source, is the sum of C's columns.

    Args:
        classes: Number of classes.
        confusion: Joint distribution of predicted and true class on held-out source images,
            (predicted, true), sum 1.
        samples: Number of images behind ``confusion``; it decides ``rho`` if that is not given.
        rho: Weight of the regulariser.
        hard: Count the most likely classes instead of probabilities.
        window: Number of predictions to keep.
        hard_confusion: The joint distribution that counts the most likely classes, for ``hard``;
            without it ``confusion`` must be that one.
    """

    def __init__(
        self,
        classes: int,
        confusion: ArrayLike | Tensor,
        samples: int | None = None,
        rho: float | None = None,
        hard: bool = False,
        window: int = 512,
        hard_confusion: ArrayLike | Tensor | None = None,
    ) -> None:
        if rho is None and samples is None:
            raise SettingError("samples or rho of rlls", must_be="given", got="neither")
        if samples is not None and samples < 1:
            raise SettingError("samples of rlls", must_be="at least 1", got=samples)
        if rho is not None and not 0 <= rho < math.inf:
            raise SettingError("rho of rlls", must_be="at least 0", got=rho)
        self.samples, self.rho = samples, rho
        self._rho = default_rho(classes, samples or 1) if rho is None else rho
        super().__init__(classes, confusion, hard, window, hard_confusion)

    def solve(self, rows: Array, before: Array) -> Array:
        """The weighted source prior."""
        difference = rows.mean(0) - self._joint.sum(1)
        q: Array = (1 + rlls_theta(self._joint, difference, self._rho)) * self._source_prior
        return q if q.sum() > 0 else self._source_prior


def default_rho(classes: int, samples: int) -> float:
    """A hundredth of the bound on the error of a confusion matrix, as in the authors' code."""
    doubt = math.log(2 * classes / DOUBT)
    return SHARE * 3 * (2 * doubt / (3 * samples) + math.sqrt(2 * doubt / samples))


def rlls_theta(joint: Array, difference: Array, rho: float) -> Array:
    """Minimise |joint theta - difference| + rho |theta| over theta >= -1.

    A minimiser also solves the bounded ridge problem |joint theta - difference|^2 + r |theta|^2
    with r = rho |residual| / |theta|. Along r the objective falls, then rises, so r is found by
    bracketing; each ridge problem is one of non-negative least squares.
    """
    if np.linalg.norm(joint.T @ difference) <= rho * np.linalg.norm(difference):
        return np.zeros_like(difference)  # the slope at zero cannot pay for the regulariser

    def ridge(log_r: float) -> Array:
        root = math.exp(log_r / 2) * np.eye(len(difference))
        target = np.concatenate([difference + joint.sum(1), root.sum(1)])
        weights, _ = nnls(np.vstack([joint, root]), target, maxiter=100 * len(difference))
        return np.asarray(weights - 1)

    def excess(log_r: float) -> float:
        theta = ridge(log_r)
        target = rho * float(np.linalg.norm(joint @ theta - difference))
        return log_r + math.log(np.linalg.norm(theta) + _TINY) - math.log(target + _TINY)

    low, high = (math.log(r) for r in _RIDGE)
    if excess(low) >= 0:  # the residual vanishes before the regulariser matters
        return ridge(low)
    return ridge(float(brentq(excess, low, high, xtol=1e-9)))
