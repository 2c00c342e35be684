"""Bias-corrected temperature scaling (BCTS): the calibration that prior estimation needs.

Alexandari, Kundaje and Shrikumar, "Maximum Likelihood with Bias-Corrected Calibration is
Hard-To-Beat at Label Shift Adaptation", ICML 2020, https://arxiv.org/abs/1901.06852.

Here the calibrated probabilities always assume *equally frequent classes*: the frequencies in the
calibration set are part of the fit, not of the map. A model trained with balanced softmax starts
there (T = 1, bias 0); one trained with cross-entropy gets about -log pi_s as its bias.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from twoshift.errors import DataError

SLOPES = (0.05, 20.0)  # bounds of 1 / temperature; separable data have no maximum
LARGEST_BIAS = 20.0


def scaled(probs: Tensor, temperature: float = 1.0, bias: Tensor | None = None) -> Tensor:
    """The calibrated probabilities softmax(log p / T + b)."""
    if temperature == 1 and bias is None:
        return probs
    # a zero would stay zero under every bias: it means "below what float32 can say"
    logits = probs.clamp_min(torch.finfo(probs.dtype).tiny).log() / temperature
    if bias is not None:
        logits = logits + bias.to(probs)
    return logits.softmax(1)


def fit_bcts(logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """Temperature and bias of greatest likelihood, bias with mean 0.

    Maximises the likelihood of ``labels`` under softmax(logits / T + b + log pi), where pi are the
    frequencies of ``labels``: convex in (1 / T, b).

    Args:
        logits: Logits of held-out samples, (N, classes).
        labels: Their true classes, (N,); every class must occur.
    """
    z = logits.detach().cpu().double().numpy()
    y = labels.detach().cpu().numpy()
    shares = class_shares(y, z.shape[1])
    log_prior = np.log(shares)
    stretch = 1 / np.sqrt(shares)  # the rarer a class, the flatter the likelihood in its bias
    rows, truth = np.arange(len(y)), np.eye(z.shape[1])[y]

    def objective(x: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        s = z * x[0] + x[1:] * stretch + log_prior
        s = s - s.max(1, keepdims=True)
        log_p = s - np.log(np.exp(s).sum(1, keepdims=True))
        residual = (np.exp(log_p) - truth) / len(y)
        gradient = np.concatenate([[(residual * z).sum()], residual.sum(0) * stretch])
        return float(-log_p[rows, y].mean()), gradient

    start = np.concatenate([[1.0], np.zeros(z.shape[1])])
    bounds = [SLOPES] + [(-LARGEST_BIAS / f, LARGEST_BIAS / f) for f in stretch]
    options = {"maxiter": 1000, "ftol": 1e-12, "gtol": 1e-7}
    best = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    bias = best.x[1:] * stretch
    return float(1 / best.x[0]), torch.from_numpy(bias - bias.mean())


def class_shares(labels: NDArray[np.int64], classes: int) -> NDArray[np.float64]:
    """Frequencies of the classes, all of which must occur."""
    values = np.unique(labels)
    if not np.array_equal(values, np.arange(classes)):
        absent = np.setdiff1d(np.arange(classes), values)
        raise DataError(
            "labels to calibrate on",
            must_be=f"0 to {classes - 1}, each at least once",
            got=f"none of class {absent[0]}" if len(absent) else f"{values[0]} to {values[-1]}",
        )
    return np.bincount(labels) / len(labels)
