"""Fit what the judge reads: ridge regressions on windows of images whose labels are known."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twoshift.accuracy.signals import NAMES
from twoshift.accuracy.views import VIEWS

Array = NDArray[np.float64]
RIDGE = 0.01  # chosen on windows of a corruption that was left out
SHIFTED = (0.025, 0.975)  # quantiles of errors that the interval covers


class Windows(NamedTuple):
    """Windows of predictions for corrupted images with shifted labels, one row each.

    Attributes:
        corruption: Number of the corruption, (windows,).
        view: Position in `VIEWS` of the statistics that predicted.
        signals: Signals of the predictions, adjusted by the label estimate, (windows, 4).
        right: Their accuracy, (windows,).
    """

    corruption: Tensor
    view: Tensor
    signals: Tensor
    right: Tensor

    @staticmethod
    def cat(parts: list[Windows]) -> Windows:
        """All windows of several parts."""
        return Windows(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def of(self, rows: Tensor) -> Windows:
        """Some of the windows."""
        return Windows(*(tensor[rows] for tensor in self))


def fit_accuracy(windows: Windows, threshold: float) -> Tensor:
    """The fact `accuracy_judge`, see `ExpectedAccuracy`.

    Args:
        windows: The windows.
        threshold: Confidence above which an image counts as sure.
    """
    rows = []
    for view in _views(windows):
        own = windows.of(windows.view == view)
        x, y = own.signals.double().numpy(), own.right.double().numpy()
        weights, intercept = ridge(x, y, RIDGE)
        low, high = np.quantile(left_out_errors(x, y, own.corruption.numpy(), RIDGE), SHIFTED)
        rows.append([*weights, intercept, low, high, threshold])
    assert len(rows[0]) == len(NAMES) + 4
    return torch.tensor(rows, dtype=torch.float64)


def _views(windows: Windows) -> list[int]:
    """The view to fit for each of `VIEWS`: a network without batch normalisation has only one."""
    known = windows.view.unique().tolist()
    return [view if view in known else known[-1] for view in range(len(VIEWS))]


def ridge(x: Array, y: Array, strength: float) -> tuple[Array, float]:
    """Weights and intercept of a ridge regression on standardised columns."""
    mean, scale = x.mean(0), x.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    z = (x - mean) / scale
    gram = z.T @ z + strength * len(y) * np.eye(x.shape[1])
    weights = np.linalg.solve(gram, z.T @ (y - y.mean())) / scale
    return weights, float(y.mean() - mean @ weights)


def left_out_errors(x: Array, y: Array, group: NDArray[np.int64], strength: float) -> Array:
    """Errors (true minus foretold) on every group by a regression on the others."""
    errors = np.zeros(len(y))
    for name in np.unique(group):
        test = group == name
        weights, intercept = ridge(x[~test], y[~test], strength)
        errors[test] = y[test] - x[test] @ weights - intercept
    return errors
