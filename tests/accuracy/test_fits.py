"""Ridge regressions against least squares with added rows; what the judge are fitted to."""

import numpy as np
import pytest
import torch

from twoshift.accuracy import ExpectedAccuracy
from twoshift.accuracy.fits import (
    RIDGE,
    Windows,
    fit_accuracy,
    left_out_errors,
    ridge,
)


def by_least_squares(x, y, strength):
    """Penalties as rows: each says that the weight of a standardised column is zero."""
    mean, scale = x.mean(0), x.std(0)
    scale = np.where(scale > 0, scale, 1)
    rows = np.column_stack([(x - mean) / scale, np.ones(len(x))])
    penalty = np.sqrt(strength * len(x)) * np.eye(x.shape[1], x.shape[1] + 1)
    target = np.concatenate([y, np.zeros(x.shape[1])])
    solved = np.linalg.lstsq(np.vstack([rows, penalty]), target, rcond=None)[0]
    weights = solved[:-1] / scale
    return weights, solved[-1] - mean @ weights


def numbers(rows=60, columns=4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(3, [1, 5, 0.1, 2], (rows, columns))
    return x, x @ [0.3, -0.1, 2.0, 0.0] + rng.normal(0, 0.2, rows) + 7


@pytest.mark.parametrize("strength", [1e-8, 0.01, 1.0])
def test_ridge(strength):
    x, y = numbers()
    weights, intercept = ridge(x, y, strength)
    expected, constant = by_least_squares(x, y, strength)
    np.testing.assert_allclose(weights, expected, rtol=1e-8, atol=1e-10)
    assert intercept == pytest.approx(constant)


def test_a_constant_column_has_no_weight():
    x, y = numbers()
    x[:, 1] = 4.0
    weights, intercept = ridge(x, y, 0.01)
    assert weights[1] == 0
    assert np.isfinite([*weights, intercept]).all()


def test_every_group_is_foretold_by_the_others():
    x, y = numbers()
    group = np.arange(60) % 3
    errors = left_out_errors(x, y, group, 0.05)
    for i in range(60):
        others = [j for j in range(60) if group[j] != group[i]]
        weights, intercept = by_least_squares(x[others], y[others], 0.05)
        assert errors[i] == pytest.approx(y[i] - (x[i] @ weights + intercept))


def windows(views=(0, 1, 2), count=40, seed=0):
    """Windows with signals at random, and accuracies that are linear in them, by view."""
    generator, parts = torch.Generator().manual_seed(seed), []
    for view in views:
        signals = torch.rand(count, 4, generator=generator)
        right = signals @ torch.tensor([0.6, -0.2, 0.1, 0.0]) + 0.05 * view
        corruption = torch.arange(count) % 4
        parts.append(Windows(corruption, torch.full((count,), view), signals, right))
    return Windows.cat(parts)


@pytest.mark.parametrize("views", [(0, 1, 2), (2,)])
def test_accuracy_is_fitted_view_by_view(views):
    seen = windows(views)
    judge = fit_accuracy(seen, 0.7)
    ExpectedAccuracy(5, judge)  # takes it
    for view, row in enumerate(judge.numpy()):
        own = seen.of(seen.view == (view if len(views) == 3 else 2))
        x, y = own.signals.double().numpy(), own.right.double().numpy()
        weights, constant = by_least_squares(x, y, RIDGE)
        np.testing.assert_allclose(row[:5], [*weights, constant], rtol=1e-5, atol=1e-7)
        errors = left_out_errors(x, y, own.corruption.numpy(), RIDGE)
        np.testing.assert_allclose(row[5:7], np.quantile(errors, [0.025, 0.975]), atol=1e-7)
        assert row[5] <= 0 <= row[6]
        assert row[7] == 0.7
