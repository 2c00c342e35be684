import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twoshift.errors import SettingError
from twoshift.estimators.ema import EMA, keep_top


def reference(batches, classes, alpha, top_k, bias_correction):
    """The formula in plain Python floats, sample by sample."""
    y = [1 / classes] * classes
    for batch in batches:
        total = [0.0] * classes
        for row in batch:
            kept = sorted(range(classes), key=lambda c: -row[c])[: top_k or classes]
            mass = math.fsum(row[c] for c in kept) if top_k else 1.0
            for c in kept:
                total[c] += row[c] / mass
        y = [alpha * t / len(batch) + (1 - alpha) * old for t, old in zip(total, y, strict=True)]
    if bias_correction and batches:
        left = (1 - alpha) ** len(batches)
        y = [(v - left / classes) / (1 - left) for v in y]
    return y


@settings(deadline=None)
@given(
    st.integers(2, 8),
    st.integers(0, 6),
    st.floats(0.01, 1),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_the_formula(classes, n, alpha, cut, bias_correction, seed):
    rng = np.random.default_rng(seed)
    top_k = int(rng.integers(1, classes + 1)) if cut else None
    batches = [rng.dirichlet(np.ones(classes), size=rng.integers(1, 6)) for _ in range(n)]
    ema = EMA(classes, alpha=alpha, top_k=top_k, bias_correction=bias_correction)
    for batch in batches:
        ema.update(torch.from_numpy(batch))
    expected = reference([b.tolist() for b in batches], classes, alpha, top_k, bias_correction)
    np.testing.assert_allclose(ema.prior.numpy(), expected, atol=2e-6)


def test_the_start_is_uniform():
    for correction in (False, True):
        assert EMA(4, bias_correction=correction).prior.tolist() == [0.25] * 4


def test_alpha_one_is_the_mean_of_the_last_batch():
    ema = EMA(3, alpha=1)
    ema.update(torch.tensor([[1.0, 0, 0]]))
    ema.update(torch.tensor([[0, 1.0, 0], [0, 0, 1.0]]))
    assert ema.prior.tolist() == [0, 0.5, 0.5]


def test_a_constant_prediction_is_reached_at_once_only_with_the_correction():
    probs = torch.tensor([[0.7, 0.2, 0.1]])
    plain, corrected = EMA(3), EMA(3, bias_correction=True)
    for _ in range(3):
        plain.update(probs)
        corrected.update(probs)
        torch.testing.assert_close(corrected.prior, probs[0])
    left = 0.9**3
    torch.testing.assert_close(plain.prior, left / 3 + (1 - left) * probs[0])


@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 0.1])
def test_the_correction_never_makes_a_class_negative(alpha):
    ema = EMA(1000, alpha=alpha, bias_correction=True)
    for _ in range(3):
        ema.update(torch.eye(1000)[:2])
        assert (ema.prior >= 0).all()
        torch.testing.assert_close(ema.prior[:2], torch.tensor([0.5, 0.5]))


def test_after_many_batches_it_is_still_a_distribution():
    ema = EMA(10, alpha=0.01)
    g = torch.Generator().manual_seed(0)
    for _ in range(2000):
        ema.update(torch.rand(2, 10, generator=g).softmax(1))
    assert abs(ema.prior.double().sum() - 1) < 1e-5


def test_keep_top():
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    torch.testing.assert_close(keep_top(probs, 2)[0], torch.tensor([0.5 / 0.8, 0.3 / 0.8, 0.0]))
    assert keep_top(probs, 1).tolist() == [[1, 0, 0], [0, 0, 1]]
    torch.testing.assert_close(keep_top(probs, 3), probs)
    tied = keep_top(torch.full((1, 4), 0.25), 2)
    assert sorted(tied[0].tolist()) == [0, 0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("alpha", 0),
        ("alpha", -0.1),
        ("alpha", 1.1),
        ("alpha", math.nan),
        ("top_k", 0),
        ("top_k", 5),
    ],
)
def test_settings_out_of_range_are_refused(setting, value):
    with pytest.raises(SettingError, match=f"{setting} of ema"):
        EMA(4, **{setting: value})
