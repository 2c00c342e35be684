import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from tests.estimators.gaussians import SOURCE, TARGET, batches, draw, error, joint
from twoshift.errors import SettingError
from twoshift.estimators import BBSE, RLLS
from twoshift.estimators.rlls import default_rho, rlls_theta

HELD_OUT, LABELS = draw(SOURCE, 200_000, 0)
SOFT = joint(HELD_OUT, LABELS)


def objective(theta, confusion, difference, rho):
    return np.linalg.norm(confusion @ theta - difference) + rho * np.linalg.norm(theta)


def reference(confusion, difference, rho):
    """A general solver, from several starts; the best of them."""
    found = [np.zeros(len(difference))]
    for start in np.random.default_rng(0).uniform(-0.9, 2, (5, len(difference))):
        result = minimize(
            objective,
            start,
            args=(confusion, difference, rho),
            method="SLSQP",
            bounds=[(-1, None)] * len(difference),
            options={"maxiter": 2000, "ftol": 1e-14},
        )
        found.append(result.x)
    return min(found, key=lambda theta: objective(theta, confusion, difference, rho))


def problem(seed, classes=5):
    rng = np.random.default_rng(seed)
    prior, target = rng.dirichlet(np.ones(classes)), rng.dirichlet(np.full(classes, 0.5))
    rates = 0.6 * np.eye(classes) + 0.4 * rng.dirichlet(np.ones(classes), classes).T
    confusion = rates * prior
    seen = rng.multinomial(200, rates @ target) / 200
    return confusion, seen - confusion.sum(1)


@pytest.mark.parametrize("rho", [1e-3, 1e-2, 0.05, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_the_solver_finds_the_minimum(seed, rho):
    confusion, difference = problem(seed)
    theta = rlls_theta(confusion, difference, rho)
    expected = reference(confusion, difference, rho)
    assert (theta >= -1).all()
    value = objective(theta, confusion, difference, rho)
    assert value <= objective(expected, confusion, difference, rho) + 1e-8
    np.testing.assert_allclose(theta, expected, atol=2e-2)  # the valley is flat


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 8), st.floats(1e-4, 1), st.integers(0, 10**6))
def test_the_conditions_of_a_minimum_hold(classes, rho, seed):
    confusion, difference = problem(seed, classes)
    theta = rlls_theta(confusion, difference, rho)
    residual = confusion @ theta - difference
    if np.linalg.norm(theta) == 0:
        slope = np.linalg.norm(confusion.T @ difference) / np.linalg.norm(difference)
        assert slope <= rho * (1 + 1e-9)
    elif np.linalg.norm(residual) > 1e-6:  # else the objective has a kink there
        slope = confusion.T @ residual / np.linalg.norm(residual)
        slope = slope + rho * theta / np.linalg.norm(theta)
        free = theta > -1 + 1e-9
        assert np.abs(slope[free]).max(initial=0) < 1e-5
        assert slope[~free].min(initial=0) > -1e-5


def test_every_estimate_is_that_of_the_window():
    probs = draw(TARGET, 200, 1)[0]
    rlls = RLLS(4, SOFT, rho=0.01, window=60)
    for i, batch in enumerate(batches(probs, 20), 1):
        rlls.update(torch.tensor(batch))
        mean = probs[: 20 * i][-60:].mean(0)
        q = (1 + reference(SOFT, mean - SOFT.sum(1), 0.01)) * SOFT.sum(0)
        np.testing.assert_allclose(rlls.prior, q / q.sum(), atol=2e-4)


def test_without_regularisation_it_is_bbse():
    probs = torch.tensor(draw([0.25] * 4, 512, 2)[0])
    rlls, bbse = RLLS(4, SOFT, rho=0), BBSE(4, SOFT)
    rlls.update(probs)
    bbse.update(probs)
    assert (bbse.prior > 0).all()  # else they cut at zero in different ways
    torch.testing.assert_close(rlls.prior, bbse.prior, atol=1e-4, rtol=0)


def test_with_much_of_it_it_stays_at_the_source():
    rlls = RLLS(4, SOFT, rho=10)
    rlls.update(torch.tensor(draw(TARGET, 512, 3)[0]))
    np.testing.assert_allclose(rlls.prior, SOFT.sum(0), atol=1e-6)


def test_the_prior_of_a_simulated_stream_is_found():
    rlls = RLLS(4, SOFT, samples=200_000, window=8192)
    for batch in batches(draw(TARGET, 8192, 4)[0], 512):
        rlls.update(torch.tensor(batch))
    assert error(rlls) < 0.1


def test_the_default_weight_of_the_regulariser():
    bound = 2 * math.log(400) / 3000 + math.sqrt(2 * math.log(400) / 1000)
    assert default_rho(10, 1000) == pytest.approx(0.03 * bound)
    assert RLLS(4, SOFT, samples=50)._rho > RLLS(4, SOFT, samples=5000)._rho


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 5), st.booleans(), st.integers(0, 10**6))
def test_it_is_always_a_distribution(classes, n, degenerate, seed):
    rng = np.random.default_rng(seed)
    confusion = np.maximum(rng.dirichlet(np.full(classes**2, 0.2)), 1e-9)
    confusion = (confusion / confusion.sum()).reshape(classes, classes)
    if degenerate:  # everything is predicted as one class
        confusion = np.zeros((classes, classes))
        confusion[rng.integers(classes)] = 1 / classes
    rlls = RLLS(classes, confusion, samples=int(rng.integers(1, 1000)), window=7)
    for _ in range(3):
        rlls.update(torch.eye(classes)[torch.from_numpy(rng.integers(classes, size=n))])
        assert rlls.prior.isfinite().all()
        assert (rlls.prior >= 0).all()
        assert abs(float(rlls.prior.double().sum()) - 1) < 1e-5


@pytest.mark.parametrize(
    "bad", [{}, {"samples": 0}, {"rho": -1}, {"rho": math.inf}, {"rho": math.nan}]
)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(SettingError, match="rlls"):
        RLLS(4, SOFT, **bad)
