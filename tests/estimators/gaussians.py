"""Gaussian classes whose exact posteriors are known, under any label distribution."""

from __future__ import annotations

import numpy as np

SOURCE = np.array([0.70, 0.20, 0.07, 0.03])
TARGET = SOURCE[::-1].copy()
MEANS = np.array([[0.0, 0], [1.8, 0], [0, 1.8], [1.8, 1.8]])


def draw(prior, n, seed, assumed=SOURCE):
    """Posteriors under the prior ``assumed``, and labels, of n samples drawn under ``prior``."""
    rng = np.random.default_rng(seed)
    y = rng.choice(len(prior), n, p=prior)
    x = MEANS[y] + rng.normal(size=(n, 2))
    logits = -((x[:, None] - MEANS) ** 2).sum(-1) / 2 + np.log(assumed)
    p = np.exp(logits - logits.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True), y


def joint(probs, y):
    """Confusion matrix (predicted, true)."""
    return probs.T @ np.eye(probs.shape[1])[y] / len(y)


def one_hot(probs):
    return np.eye(probs.shape[1])[probs.argmax(1)]


def batches(probs, size=64):
    return [probs[i : i + size] for i in range(0, len(probs), size)]


def error(estimator, truth=TARGET):
    """L1 distance of the estimate to the truth."""
    return float(np.abs(estimator.prior.double().numpy() - truth).sum())
