"""Readout: a regression from the mean prediction to the label distribution behind it."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from twoshift.estimators._window import Array, Windowed, numbers
from twoshift.estimators.base import estimators
from twoshift.registry import check_numbers

FLOOR = 1e-4  # smallest share: the logarithm of a smaller one would dominate the regression
RIDGES = 10.0 ** np.arange(-4, 4)  # strengths of the penalty per window, to choose from


@estimators.register("readout")
class Readout(Windowed):
    """The label distribution behind the mean of the last predictions, learnt from source images.

    Normalisation by the batch draws the mean prediction towards the labels of training, and a model
    mistakes some classes for others. Both happen on source images as well, so a regression learns
    to undo them on label-shifted windows of training images, normalised as in use.

    Args:
        classes: Number of classes.
        regression: Weights of a regression on (1, p, log p), (1 + 2 classes, classes), as
            `fit_readout` returns them.
        pseudo_count: Samples of every class to add to the window: a Dirichlet prior.
        window: Number of predictions to keep.
    """

    def __init__(
        self,
        classes: int,
        regression: ArrayLike | Tensor,
        pseudo_count: float = 1.0,
        window: int = 512,
    ) -> None:
        super().__init__(classes, window)
        check_numbers("readout", "above 0 and finite", pseudo_count=pseudo_count)
        shape = (1 + 2 * classes, classes)
        self.regression = numbers("regression of readout", regression, shape)
        self.pseudo_count = pseudo_count
        self.reset()

    def keep(self, probs: Tensor) -> Tensor:
        """The probabilities."""
        return probs

    def solve(self, rows: Array, before: Array) -> Array:
        """The regression without its negative part, plus the pseudo-counts."""
        q = np.maximum(regressors(rows.mean(0)) @ self.regression.numpy(), 0)
        share = q / q.sum() if q.sum() > 0 else np.full(self.classes, 1 / self.classes)
        counts: Array = len(rows) * share + self.pseudo_count
        return counts


def regressors(means: Array) -> Array:
    """(1, p, log p) of mean predictions p, (..., classes)."""
    logs = np.log(np.maximum(means, FLOOR))
    return np.concatenate([np.ones_like(means[..., :1]), means, logs], axis=-1)


def fit_readout(means: Array, truths: Array) -> Tensor:
    """Ridge regression of label distributions on mean predictions, (1 + 2 classes, classes).

    The strength of the penalty is the one with the least squared error under leave-one-out.

    Args:
        means: Mean prediction of every window, (N, classes).
        truths: Share of every class among its labels, (N, classes).
    """
    x, y = regressors(means)[:, 1:], truths
    centre, scale = x.mean(0), np.maximum(x.std(0), FLOOR)
    u, s, v = np.linalg.svd((x - centre) / scale, full_matrices=False)
    middle = y.mean(0)
    best, least = np.zeros((x.shape[1], y.shape[1])), math.inf
    for ridge in RIDGES * len(x):
        shrinkage = s**2 / (s**2 + ridge)
        leverage = 1 / len(x) + u**2 @ shrinkage
        residual = (y - middle - u @ (shrinkage[:, None] * (u.T @ y))) / (1 - leverage)[:, None]
        if (error := float((residual**2).mean())) < least:
            least, best = error, v.T @ ((s / (s**2 + ridge))[:, None] * (u.T @ y))
    slopes = best / scale[:, None]
    return torch.from_numpy(np.vstack([middle - centre @ slopes, slopes])).float()
