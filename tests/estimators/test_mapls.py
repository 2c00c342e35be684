"""MAPLS and FMAPLS against loops over samples and classes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.estimators.gaussians import SOURCE, TARGET, batches, draw, error
from twoshift.errors import SettingError
from twoshift.estimators import EM, FMAPLS, MAPLS, OnlineFMAPLS, create
from twoshift.estimators.mapls import chosen_weight


def posterior(row, q, assumed):
    shares = [p * a / b for p, a, b in zip(row, q, assumed, strict=True)]
    return [s / sum(shares) for s in shares]


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def slow_em(rows, assumed, weight, steps):
    classes = len(assumed)
    q = [1 / classes] * classes
    for _ in range(steps):
        each = [posterior(row, q, assumed) for row in rows]
        mean = [sum(p[c] for p in each) / len(rows) for c in range(classes)]
        q = [weight * m + (1 - weight) / classes for m in mean]
    return q


def slow_weight(q, source):
    """The rule as the authors give it."""

    def forward(d, g):
        return g * d / (1 + g * d)

    def inverse(d, share):
        return (1 / (1 - share) - 1) / d

    uniform = [1 / len(q)] * len(q)
    corrected = 1 - forward(kl(source, uniform), inverse(0.5, 0.2))
    scale = inverse(0.5, corrected)
    return 0.9 * forward(kl(q, uniform), scale) + 0.1 * (1 - forward(kl(q, source), scale))


def slow_fmapls(rows, assumed, concentration, steps):
    classes = len(assumed)
    q, alpha = [1 / classes] * classes, [1.0] * classes
    for _ in range(steps):
        each = [posterior(row, q, assumed) for row in rows]
        counts = [max(alpha[c] - 1 + sum(p[c] for p in each), 0) for c in range(classes)]
        q = [max(n / sum(counts), 1e-6) for n in counts]
        q = [n / sum(q) for n in q]
        alpha = [concentration * n / max(q) for n in q]
    return q


def stream():
    """Ten batches, and what a window of 60 holds after each."""
    probs = draw(TARGET, 200, 0)[0].astype(np.float32)
    for i, batch in enumerate(batches(probs, 20), 1):
        yield torch.tensor(batch), probs[: 20 * i][-60:].astype(np.float64).tolist()


@pytest.mark.parametrize("weight", [None, 0.3, 1.0])
def test_mapls_by_hand(weight):
    source = SOURCE.tolist()
    live = MAPLS(4, source, source, weight=weight, window=60, max_steps=20, tol=0)
    for batch, seen in stream():
        live.update(batch)
        chosen = weight
        if weight is None:
            chosen = slow_weight(slow_em(seen, source, 1.0, 20), source)
            assert 0 < chosen < 1
        np.testing.assert_allclose(live.prior, slow_em(seen, source, chosen, 20), atol=1e-6)


def test_fmapls_by_hand():
    live = FMAPLS(4, SOURCE.tolist(), concentration=30, window=60, max_steps=20, tol=0)
    for batch, seen in stream():
        live.update(batch)
        expected = slow_fmapls(seen, SOURCE.tolist(), 30, 20)
        np.testing.assert_allclose(live.prior, expected, atol=1e-6)


@pytest.mark.parametrize("size", [1, 20])
def test_online_fmapls_by_hand_whatever_the_batches(size):
    assumed = SOURCE.tolist()
    live = OnlineFMAPLS(4, assumed, concentration=30, softness=0.7)
    q, last = [0.25] * 4, None
    probs = draw(TARGET, 100, 0)[0].astype(np.float32)
    for batch in batches(probs, size):
        live.update(torch.tensor(batch))
        for row in batch.astype(np.float64).tolist():
            now = posterior(row, q, assumed)
            predicted = now.index(max(now))
            last = predicted if last is None else last
            counts = [30 * q[c] / max(q) + 0.7 * now[c] for c in range(4)]
            counts[last] += 0.3
            last = predicted
            q = [max(n / sum(counts), 1e-6) for n in counts]
            q = [n / sum(q) for n in q]
    np.testing.assert_allclose(live.prior, q, atol=1e-6)


def test_the_rule_where_the_source_is_uniform():
    """The scale is infinite there: any divergence is all of it."""
    uniform = np.full(4, 0.25)
    assert chosen_weight(TARGET, uniform) == pytest.approx(0.9)
    assert chosen_weight(uniform, uniform) == pytest.approx(0.1)
    near = np.array([0.2501, 0.25, 0.25, 0.2499])
    assert chosen_weight(TARGET, near) == pytest.approx(0.9, abs=1e-3)


def test_a_weight_of_one_is_em_and_of_zero_is_uniform():
    probs = torch.tensor(draw(TARGET, 300, 1)[0])
    em = EM(4, SOURCE, pseudo_count=0, max_steps=100)
    free, none = (MAPLS(4, model_prior=SOURCE, weight=w) for w in (1.0, 0.0))
    for live in (em, free, none):
        live.update(probs)
    torch.testing.assert_close(free.prior, em.prior, atol=1e-4, rtol=0)
    assert torch.equal(none.prior, torch.full((4,), 0.25))


@pytest.mark.parametrize("name", ["mapls", "fmapls", "online_fmapls"])
def test_labels_that_are_not_those_of_the_source_are_found(name):
    live = create(name, 4, model_prior=SOURCE.tolist())
    for batch in batches(draw(TARGET, 2048, 2)[0]):
        live.update(torch.tensor(batch))
    assert error(live) < 0.4
    assert error(live, SOURCE) > 0.8


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["mapls", "fmapls", "online_fmapls"]),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([0.01, 1.0]),
    st.integers(0, 10**6),
)
def test_it_is_always_a_distribution(name, classes, n, sharp, seed):
    rng = np.random.default_rng(seed)
    live = create(name, classes, bias=rng.normal(0, 5, classes).tolist())
    for _ in range(3):
        probs = rng.dirichlet(np.full(classes, sharp), size=n)
        if rng.random() < 0.3:
            probs = np.eye(classes)[rng.integers(classes, size=n)]
        live.update(torch.from_numpy(probs))
        assert (live.prior >= 0).all()
        assert abs(float(live.prior.double().sum()) - 1) < 1e-5


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("mapls", "weight", 1.5),
        ("mapls", "source_prior", [0, 0.5, 0.25, 0.25]),
        ("mapls", "max_steps", 0),
        ("fmapls", "model_prior", [0, 0.5, 0.25, 0.25]),
        ("fmapls", "concentration", 0.5),
        ("online_fmapls", "softness", -0.1),
        ("online_fmapls", "temperature", 0),
        ("online_fmapls", "bias", [0.0] * 3),
    ],
)
def test_settings_out_of_range_are_refused(name, setting, value):
    with pytest.raises(SettingError, match=setting):
        create(name, 4, **{setting: value})
