"""Tilt against the likelihood written out, and on labels of a known tilt."""

import math

import numpy as np
import pytest
import torch

from twoshift.errors import SettingError
from twoshift.estimators import create

SOURCE = [0.6, 0.25, 0.1, 0.05]


def powered(t):
    weights = [p**t for p in SOURCE]
    return [w / sum(weights) for w in weights]


def posteriors(t, n, noise=1.0, seed=0):
    """Exact posteriors of Gaussian classes under uniform labels; the labels follow the tilt."""
    rng = np.random.default_rng(seed)
    y = rng.choice(4, n, p=powered(t))
    x = np.eye(4)[y] + noise * rng.normal(size=(n, 4))
    return torch.tensor(x / noise**2).softmax(1).float()


def test_it_is_the_posterior_mean_over_the_line():
    probs = posteriors(-0.5, 30)
    estimator = create("tilt", 4, source_prior=SOURCE, spread=0.8, steps=7, window=20)
    estimator.update(probs)
    weights, mean = [], np.zeros(4)
    places = [-1.5 + 0.5 * i for i in range(7)]
    for t in places:
        log_likelihood = -0.5 * (t / 0.8) ** 2
        for row in probs[-20:].tolist():
            log_likelihood += math.log(sum(q * p for q, p in zip(powered(t), row, strict=True)))
        weights.append(math.exp(log_likelihood))
    for t, weight in zip(places, weights, strict=True):
        mean += weight / sum(weights) * np.array(powered(t))
    np.testing.assert_allclose(estimator.prior, mean, atol=1e-5)


@pytest.mark.parametrize("t", [1.0, 0.0, -1.0])
def test_a_tilt_is_found_from_poor_predictions(t):
    estimator = create("tilt", 4, source_prior=SOURCE)
    for batch in posteriors(t, 512, noise=1.2).split(64):
        estimator.update(batch)
    assert float((estimator.prior - torch.tensor(powered(t))).abs().sum()) < 0.2


@pytest.mark.parametrize(
    "wrong",
    [
        {"source_prior": [1.0, 0, 0, 0]},
        {"spread": 0},
        {"steps": 2},
        {"temperature": 0},
        {"bias": [1.0]},
    ],
)
def test_settings_are_checked(wrong):
    with pytest.raises(SettingError):
        create("tilt", 4, **{"source_prior": SOURCE, **wrong})
