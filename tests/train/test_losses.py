import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from twoshift.adapters import LabelShiftAdapter, shifted_logits
from twoshift.train.adapter import adjusted_loss, between, draw_position
from twoshift.train.source import balanced_softmax

PRIOR = np.array([0.5, 0.3, 0.15, 0.05])
LAMBDAS = (1.0, 0.25, -2.0)


def slow_loss(logits, labels, tau, prior):
    """-log of the softmax of z + tau log pi at the label, averaged; one number at a time."""
    total = 0.0
    for z, y in zip(logits.tolist(), labels.tolist(), strict=True):
        odds = [math.exp(z[c]) * prior[c] ** tau for c in range(len(z))]
        total -= math.log(odds[y] / sum(odds))
    return total / len(labels)


def batch(seed=0, size=9):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, 4, generator=g, dtype=torch.float64) * 3
    return logits, torch.randint(0, 4, (size,), generator=g)


def test_balanced_softmax_equals_a_slow_loop():
    logits, labels = batch()
    loss = balanced_softmax(logits, labels, torch.from_numpy(PRIOR).log())
    assert loss.item() == pytest.approx(slow_loss(logits, labels, 1, PRIOR))
    plain = nn.functional.cross_entropy(logits, labels)
    assert abs(loss - plain) > 1e-2


@pytest.mark.parametrize("lambda_", [1, 0, -1, -2, 0.3])
def test_adjusted_loss_equals_a_slow_loop(lambda_):
    logits, labels = batch(1)
    loss = adjusted_loss(logits, labels, (1 - lambda_) * torch.from_numpy(PRIOR).log())
    assert loss.item() == pytest.approx(slow_loss(logits, labels, 1 - lambda_, PRIOR))


# -- where an iteration stands between source and reversed labels -----------------------------


def test_the_ends_and_the_middle():
    for position, prior, lambda_ in (
        (1, PRIOR, LAMBDAS[0]),
        (0, [0.25] * 4, LAMBDAS[1]),
        (-1, PRIOR[::-1], LAMBDAS[2]),
    ):
        mixed, mixed_lambda = between(position, PRIOR, LAMBDAS)
        np.testing.assert_allclose(mixed, prior)
        assert mixed_lambda == pytest.approx(lambda_)


def test_reversing_goes_by_rank_not_by_class_number():
    prior = np.array([0.5, 0.05, 0.3, 0.15])  # ranks: class 0, 2, 3, 1
    reversed_, _ = between(-1, prior, LAMBDAS)
    np.testing.assert_allclose(reversed_, [0.05, 0.5, 0.15, 0.3])


@given(st.floats(-1, 1), st.permutations(PRIOR.tolist()))
def test_linear_from_the_middle_to_either_end(position, prior):
    prior = np.array(prior)
    mixed, lambda_ = between(position, prior, LAMBDAS)
    end = 1 if position >= 0 else -1
    (p0, l0), (p1, l1) = between(0, prior, LAMBDAS), between(end, prior, LAMBDAS)
    t = position * end
    np.testing.assert_allclose(mixed, p0 + t * (p1 - p0), atol=1e-12)
    assert lambda_ == pytest.approx(l0 + t * (l1 - l0))
    assert mixed.sum() == pytest.approx(1)
    assert (mixed > 0).all()


@pytest.mark.parametrize("points", [3, 5, 7])
def test_positions_are_even_and_equally_frequent(points):
    rng = np.random.default_rng(0)
    drawn = np.array([draw_position(points, rng) for _ in range(2100)])
    values, counts = np.unique(drawn, return_counts=True)
    expected = [-1 + 2 * i / (points - 1) for i in range(points)]
    np.testing.assert_allclose(values, expected, atol=1e-12)
    share = 1 / points
    assert abs(counts / 2100 - share).max() < 5 * math.sqrt(share * (1 - share) / 2100)


def test_the_continuum_covers_the_interval_evenly():
    rng = np.random.default_rng(0)
    drawn = np.array([draw_position(0, rng) for _ in range(4000)])
    assert len(np.unique(drawn)) == 4000
    counts, _ = np.histogram(drawn, bins=8, range=(-1, 1))
    assert counts.sum() == 4000
    assert abs(counts - 500).max() < 5 * math.sqrt(500)


# -- what the loss is for ---------------------------------------------------------------------


def gaussian_problem(size=30_000):
    """log p(x|y) of three unit Gaussians on a line, for images drawn with a long-tailed prior."""
    prior = np.array([0.6, 0.3, 0.1])
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), (prior * size).astype(int))
    means = np.array([-1.0, 0.0, 1.0])
    x = means[labels] + rng.normal(size=len(labels))
    log_density = -0.5 * (x[:, None] - means) ** 2
    return torch.from_numpy(log_density).float(), torch.from_numpy(labels), prior


def minimise(parameters, loss):
    optimiser = torch.optim.LBFGS(parameters, max_iter=150, line_search_fn="strong_wolfe")

    def closure():
        optimiser.zero_grad()
        value = loss()
        value.backward()
        return value

    optimiser.step(closure)


def centred(v):
    return v - v.mean()


@pytest.mark.parametrize("lambda_", [1, 0, -2])
def test_the_minimiser_models_the_prior_to_the_power_of_lambda(lambda_):
    h, y, prior = gaussian_problem()
    log_prior = torch.from_numpy(prior).float().log()
    bias = nn.Parameter(torch.zeros(3))
    minimise([bias], lambda: adjusted_loss(h + bias, y, (1 - lambda_) * log_prior))
    torch.testing.assert_close(
        centred(bias.detach()), lambda_ * centred(log_prior), atol=0.06, rtol=0
    )


def test_an_adapter_learns_lambda_log_prior_at_every_point():
    h, y, prior = gaussian_problem()
    log_prior = torch.from_numpy(prior).float().log()
    torch.manual_seed(0)
    adapter = LabelShiftAdapter(3, 3, class_counts=prior, dw="none", gamma=False, beta=False)
    points = [between(position, prior, adapter.lambdas) for position in (1, 0, -1)]
    points = [(torch.from_numpy(p).float(), lambda_) for p, lambda_ in points]

    def loss():  # features are the exact log densities, so the head is the identity
        logits = [(shifted_logits(h, torch.eye(3), None, adapter(p)), tau) for p, tau in points]
        return sum(adjusted_loss(z, y, (1 - lambda_) * log_prior) for z, lambda_ in logits)

    minimise(list(adapter.parameters()), loss)
    for p, lambda_ in points:
        db = adapter(p).bias.detach()
        torch.testing.assert_close(centred(db), lambda_ * centred(log_prior), atol=0.08, rtol=0)


def test_the_minimiser_models_any_prior_that_the_margin_names():
    h, y, prior = gaussian_problem()
    target = torch.tensor([0.2, 0.1, 0.7])
    bias = nn.Parameter(torch.zeros(3))
    margin = torch.from_numpy(prior).float().log() - target.log()
    minimise([bias], lambda: adjusted_loss(h + bias, y, margin))
    torch.testing.assert_close(centred(bias.detach()), centred(target.log()), atol=0.06, rtol=0)
