"""The readout against a regression written out, and on predictions that hide the labels."""

import numpy as np
import pytest
import torch

from twoshift.errors import SettingError
from twoshift.estimators import create
from twoshift.estimators.readout import FLOOR, RIDGES, fit_readout

C = 3
BLUR = np.array([[0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.3, 0.1, 0.6]])  # of class, to prediction


def windows(n=60, size=400, seed=0):
    """Mean predictions that half forget the labels, and the labels' shares."""
    rng = np.random.default_rng(seed)
    truths = np.stack([np.bincount(rng.choice(C, size, p=q), minlength=C) / size
                       for q in rng.dirichlet(np.ones(C), n)])  # fmt: skip
    return (0.5 * truths + 0.5 / C) @ BLUR + rng.normal(scale=0.002, size=(n, C)), truths


def solved(x, y, ridge):
    """Ridge regression with an intercept, by the normal equations of standardised columns."""
    centre, scale = x.mean(0), x.std(0)
    z = (x - centre) / scale
    slopes = np.linalg.solve(z.T @ z + ridge * np.eye(z.shape[1]), z.T @ (y - y.mean(0)))
    slopes = slopes / scale[:, None]
    return y.mean(0) - centre @ slopes, slopes


def test_it_is_the_ridge_regression_that_predicts_left_out_windows_best():
    means, truths = windows()
    x = np.hstack([means, np.log(means)])
    errors = []
    for ridge in RIDGES * len(x):
        # standardised once, as all windows are: only the regression leaves one out
        z, wrong = (x - x.mean(0)) / x.std(0), 0.0
        for i in range(len(x)):
            rest = np.arange(len(x)) != i
            design = np.hstack([np.ones((len(x), 1)), z])
            penalty = ridge * np.diag([0.0, *np.ones(z.shape[1])])
            inner = design[rest].T @ design[rest] + penalty
            weights = np.linalg.solve(inner, design[rest].T @ truths[rest])
            wrong += ((truths[i] - design[i] @ weights) ** 2).sum()
        errors.append(wrong)
    intercept, slopes = solved(x, truths, RIDGES[int(np.argmin(errors))] * len(x))
    found = fit_readout(means, truths)
    assert found.shape == (1 + 2 * C, C)
    np.testing.assert_allclose(found[0], intercept, atol=1e-4)
    np.testing.assert_allclose(found[1:], slopes, atol=1e-4)


def test_it_reads_labels_that_the_mean_prediction_hides():
    estimator = create("readout", C, regression=fit_readout(*windows()))
    means, truths = windows(n=20, seed=1)
    read = []
    for mean in means:
        estimator.reset()
        estimator.update(torch.tensor(mean / mean.sum()).float().expand(256, C))
        read.append(estimator.prior.numpy())
    assert np.abs(np.array(read) - truths).sum(1).mean() < 0.05
    assert np.abs(means - truths).sum(1).mean() > 0.3


def test_the_estimate_is_the_regression_on_the_window_with_pseudo_counts():
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(1 + 2 * C, C))
    estimator = create("readout", C, regression=weights, window=10, pseudo_count=0.5)
    probs = torch.tensor(rng.dirichlet(np.ones(C), 14)).float()
    estimator.update(probs)
    mean = probs[-10:].double().mean(0).tolist()
    row = [1.0, *mean, *(np.log(max(p, FLOOR)) for p in mean)]
    q = [max(0.0, sum(r * w for r, w in zip(row, column, strict=True))) for column in weights.T]
    expected = [(10 * v / sum(q) + 0.5) / (10 + 0.5 * C) for v in q]
    np.testing.assert_allclose(estimator.prior, expected, atol=1e-5)


def test_a_regression_that_says_nothing_is_uniform():
    estimator = create("readout", C, regression=-np.ones((1 + 2 * C, C)) * [[1], *[[0]] * 2 * C])
    estimator.update(torch.tensor([[0.8, 0.1, 0.1]]))
    np.testing.assert_allclose(estimator.prior, [1 / C] * C, atol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"regression": [[0.0] * C] * C},
        {"regression": np.full((1 + 2 * C, C), np.nan)},
        {"pseudo_count": 0},
        {"window": 0},
    ],
)
def test_settings_are_checked(wrong):
    with pytest.raises(SettingError):
        create("readout", C, **{"regression": np.zeros((1 + 2 * C, C)), **wrong})
