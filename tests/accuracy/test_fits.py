"""Ridge regressions against least squares with added rows; what the judges are fitted to."""

import numpy as np
import pytest
import torch

from twoshift.accuracy import ExpectedAccuracy, ViewJudge
from twoshift.accuracy.fits import (
    RIDGE,
    Windows,
    fit_accuracy,
    fit_views,
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
        unadjusted, adjusted = (torch.rand(count, 4, generator=generator) for _ in range(2))
        plain = 0.4 * unadjusted[:, 0] - 0.1 * unadjusted[:, 1] + 0.2 + 0.1 * view
        right = adjusted @ torch.tensor([0.6, -0.2, 0.1, 0.0]) + 0.05 * view
        parts.append(
            Windows(
                torch.arange(count) % 4,
                torch.full((count,), view),
                unadjusted,
                adjusted,
                torch.stack([plain, right], 1),
            )
        )
    return Windows.cat(parts)


def test_the_judge_of_views_is_a_regression_with_an_offset_by_view():
    seen = windows()
    weights = fit_views(seen)
    x = torch.cat([seen.unadjusted[:, [0, 1, 3]], torch.eye(3)[seen.view]], 1).double().numpy()
    expected, constant = by_least_squares(x, seen.right[:, 0].double().numpy(), RIDGE)
    np.testing.assert_allclose(weights[:3], expected[:3], rtol=1e-6)
    np.testing.assert_allclose(weights[3:], expected[3:] + constant, rtol=1e-6)
    offsets = ViewJudge(weights).weights[3:]
    assert offsets[0] < offsets[1] < offsets[2]


def test_one_view_needs_no_judge():
    assert fit_views(windows(views=(2,))) is None


@pytest.mark.parametrize("views", [(0, 1, 2), (2,)])
def test_accuracy_is_fitted_to_the_adjusted_predictions(views):
    seen = windows(views)
    judge = fit_accuracy(seen, 0.7)
    ExpectedAccuracy(5, judge)  # takes it
    for view, row in enumerate(judge.numpy()):
        own = seen.of(seen.view == (view if len(views) == 3 else 2))
        x, y = own.adjusted.double().numpy(), own.right[:, 1].double().numpy()
        weights, constant = by_least_squares(x, y, RIDGE)
        np.testing.assert_allclose(row[:5], [*weights, constant], rtol=1e-5, atol=1e-7)
        errors = left_out_errors(x, y, own.corruption.numpy(), RIDGE)
        np.testing.assert_allclose(row[5:7], np.quantile(errors, [0.025, 0.975]), atol=1e-7)
        assert row[5] <= 0 <= row[6]
        assert row[7] == 0.7
