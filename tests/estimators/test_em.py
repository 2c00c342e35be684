import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.estimators.gaussians import SOURCE, TARGET, batches, draw, error
from twoshift.errors import PriorError, SettingError
from twoshift.estimators import EM, EMA
from twoshift.estimators._bcts import fit_bcts

UNIFORM = np.full(4, 0.25)


def reference(rows, model_prior, pseudo_count):
    """EM from uniform, one sample and one class after the other, until nothing moves."""
    classes = len(model_prior)
    q = [1 / classes] * classes
    for _ in range(20_000):
        counts = [pseudo_count] * classes
        for row in rows:
            share = [row[c] * q[c] / model_prior[c] for c in range(classes)]
            for c in range(classes):
                counts[c] += share[c] / sum(share)
        new = [c / sum(counts) for c in counts]
        moved = sum(abs(a - b) for a, b in zip(new, q, strict=True))
        q = new
        if moved < 1e-10:
            break
    return q


@pytest.mark.parametrize("pseudo_count", [0.5, 2])
def test_every_estimate_is_that_of_the_window(pseudo_count):
    probs = draw(TARGET, 200, 0)[0]
    em = EM(4, SOURCE, pseudo_count=pseudo_count, window=60, tol=1e-10, max_steps=20_000)
    for i, batch in enumerate(batches(probs, 20), 1):
        em.update(torch.tensor(batch))
        if i in (1, 3, 4, 10):  # filling, full, sliding
            seen = probs[: 20 * i][-60:].tolist()
            expected = reference(seen, SOURCE.tolist(), pseudo_count)
            np.testing.assert_allclose(em.prior, expected, atol=1e-5)


def test_the_prior_of_a_simulated_stream_is_found_where_averages_fail():
    em = EM(4, SOURCE, window=4096, pseudo_count=0)
    ema = EMA(4, alpha=0.05)
    for batch in batches(draw(TARGET, 4096, 1)[0]):
        for e in (em, ema):
            e.update(torch.tensor(batch))
    assert error(em) < 0.1
    assert error(ema) > 0.4


def test_calibration_takes_the_place_of_the_model_prior():
    """Distorted predictions: BCTS on source samples, then EM with equal classes."""
    source, y = draw(SOURCE, 4000, 2)
    target, _ = draw(TARGET, 4096, 3)
    logits = 3 * np.log(source) + [0, 1, 0, -1]
    temperature, bias = fit_bcts(torch.tensor(logits), torch.tensor(y))
    raw = torch.tensor(3 * np.log(target) + [0, 1, 0, -1]).softmax(1)
    em = EM(4, temperature=temperature, bias=bias, window=4096)
    wrong = EM(4, SOURCE, window=4096)
    for batch in batches(raw):
        em.update(batch)
        wrong.update(batch)
    assert error(em) < 0.15 < error(wrong)


def test_it_follows_a_change():
    em = EM(4, SOURCE)
    for batch in batches(draw(SOURCE, 2048, 4)[0]):
        em.update(torch.tensor(batch))
    assert error(em, SOURCE) < 0.25
    for batch in batches(draw(TARGET, 512, 5)[0]):
        em.update(torch.tensor(batch))
    assert error(em) < 0.25


def test_a_class_that_had_vanished_comes_back_without_pseudo_counts():
    em = EM(2, pseudo_count=0, window=8)
    for _ in range(300):
        em.update(torch.tensor([[0.9, 0.1]] * 8))
    assert em.prior[1] < 1e-4
    em.update(torch.tensor([[0.1, 0.9]] * 8))
    assert em.prior[1] > 0.99


def test_pseudo_counts_are_samples_of_every_class():
    em = EM(3, pseudo_count=2)
    em.update(torch.eye(3)[[0, 0, 0, 1]])
    np.testing.assert_allclose(em.prior, np.array([5, 3, 2]) / 10, atol=1e-6)


def test_a_batch_larger_than_the_window_leaves_its_end():
    probs = torch.tensor(draw(TARGET, 100, 6)[0])
    large, small = (EM(4, SOURCE, window=30) for _ in range(2))
    large.update(probs)
    small.update(probs[-30:])
    torch.testing.assert_close(large.prior, small.prior)


def test_the_state_has_the_same_shapes_from_the_first_to_the_last():
    em = EM(4, window=10)
    shapes = {k: v.shape for k, v in em.state().items()}
    for batch in batches(draw(TARGET, 50, 7)[0], 7):
        em.update(torch.tensor(batch))
        assert {k: v.shape for k, v in em.state().items()} == shapes


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.05, 1.0, 20.0]),
    st.sampled_from([0.01, 1.0]),
    st.integers(0, 10**6),
)
def test_it_is_always_a_distribution(classes, n, pseudo_count, temperature, sharp, seed):
    rng = np.random.default_rng(seed)
    bias = rng.normal(0, 5, classes).tolist()
    em = EM(classes, temperature=temperature, bias=bias, pseudo_count=pseudo_count, window=7)
    for _ in range(3):
        probs = rng.dirichlet(np.full(classes, sharp), size=n)
        if rng.random() < 0.3:
            probs = np.eye(classes)[rng.integers(classes, size=n)]
        em.update(torch.from_numpy(probs))
        assert em.prior.isfinite().all()
        assert (em.prior >= 0).all()
        assert abs(float(em.prior.double().sum()) - 1) < 1e-5


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("window", 0),
        ("temperature", 0),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("bias", [0.0] * 3),
        ("bias", [0.0, 0, 0, math.nan]),
        ("pseudo_count", -1),
        ("pseudo_count", math.nan),
        ("max_steps", 0),
        ("tol", -1),
        ("tol", math.nan),
        ("model_prior", [0, 0.5, 0.25, 0.25]),
    ],
)
def test_settings_out_of_range_are_refused(setting, value):
    with pytest.raises(SettingError, match=setting):
        EM(4, **{setting: value})


def test_a_model_prior_that_is_none_is_refused():
    with pytest.raises(PriorError):
        EM(4, [0.5, 0.5])


@pytest.mark.slow
def test_quapy_agrees():
    pytest.importorskip("quapy")
    from quapy.method.aggregative import EMQ

    probs = draw(TARGET, 500, 8)[0].astype(np.float32).astype(np.float64)
    expected, _ = EMQ.EM(SOURCE, probs, epsilon=1e-9)
    em = EM(4, SOURCE, pseudo_count=0, window=500, tol=1e-9)
    em.update(torch.tensor(probs))
    np.testing.assert_allclose(em.prior, expected, atol=1e-4)
