import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.estimators.gaussians import SOURCE, draw
from twoshift.errors import DataError
from twoshift.estimators._bcts import fit_bcts, scaled


def distorted(n, seed, temperature, bias, prior=SOURCE):
    """Logits that the map (temperature, bias) turns into posteriors of equal classes."""
    probs, y = draw(prior, n, seed, assumed=np.full(4, 0.25))
    return (torch.tensor(np.log(probs)) - torch.tensor(bias)) * temperature, torch.tensor(y)


def nll(logits, y, temperature, bias):
    log_prior = (torch.bincount(y) / len(y)).double().log()
    return float(F.cross_entropy(logits / temperature + bias + log_prior, y))


def test_the_map_is_recovered():
    bias = [0.5, -0.2, 0.1, -0.4]
    logits, y = distorted(20_000, 0, 2.0, bias)
    temperature, fitted = fit_bcts(logits, y)
    assert temperature == pytest.approx(2.0, rel=0.05)
    assert fitted.tolist() == pytest.approx(bias, abs=0.15)
    assert float(fitted.sum()) == pytest.approx(0, abs=1e-9)


def test_no_neighbour_is_more_likely():
    logits, y = distorted(500, 1, 0.6, [1.0, 0, 0, -1])
    temperature, bias = fit_bcts(logits, y)
    best = nll(logits, y, temperature, bias)
    rng = np.random.default_rng(0)
    for size in (1e-3, 1e-2, 0.1, 1):
        for _ in range(20):
            t = temperature * np.exp(size * rng.normal())
            assert nll(logits, y, t, bias + torch.tensor(size * rng.normal(size=4))) >= best - 1e-9


def test_the_mean_of_the_map_is_the_prior_of_the_set():
    """What maximum likelihood means for a bias; it makes EM report no shift where there is none."""
    logits, y = distorted(800, 2, 1.5, [0.0, 1, 0, 1])
    temperature, bias = fit_bcts(logits, y)
    share = torch.bincount(y).double() / len(y)
    probs = (logits / temperature + bias + share.log()).softmax(1)
    torch.testing.assert_close(probs.mean(0), share, atol=1e-5, rtol=0)


def test_cross_entropy_and_balanced_logits_mean_the_same():
    logits, y = distorted(2000, 3, 1.0, [0.0] * 4)
    temperature, bias = fit_bcts(logits, y)
    trained, shifted = fit_bcts(logits + torch.tensor(SOURCE).log(), y)
    assert trained == pytest.approx(temperature, abs=1e-4)
    expected = bias - torch.tensor(SOURCE).log() / temperature
    torch.testing.assert_close(shifted, expected - expected.mean(), atol=1e-3, rtol=0)


def test_separable_classes_stay_finite():
    y = torch.arange(4).repeat(5)
    temperature, bias = fit_bcts(torch.eye(4)[y], y)
    assert 0 < temperature < 1
    assert bias.isfinite().all()


@pytest.mark.parametrize(
    ("labels", "got"),
    [
        ([0, 1, 1], "none of class 2"),
        ([0, 1, 3], "none of class 2"),
        ([0, 1, 2, 3], "0 to 3"),
        ([-1, 0, 1, 2], "-1 to 2"),
        ([0.0, 0.5, 1.0, 2.0], "0.0 to 2.0"),
    ],
)
def test_every_class_must_occur(labels, got):
    with pytest.raises(DataError, match=f"must be 0 to 2, each at least once, got {got}"):
        fit_bcts(torch.zeros(len(labels), 3), torch.tensor(labels))


def test_scaled_is_the_formula():
    probs = torch.tensor(draw(SOURCE, 50, 4)[0])
    bias = [0.3, 0, -1, 2]
    for row, got in zip(
        probs, scaled(probs, 2.0, torch.tensor(bias, dtype=torch.float64)), strict=True
    ):
        weights = [float(p) ** 0.5 * np.exp(b) for p, b in zip(row, bias, strict=True)]
        np.testing.assert_allclose(got, np.array(weights) / sum(weights), rtol=1e-9)
    assert scaled(probs) is probs
    torch.testing.assert_close(scaled(probs, 1.0, torch.full((4,), 5.0)), probs)


def test_scaled_knows_zeros():
    out = scaled(torch.eye(3), 0.5, torch.tensor([0.0, 1, 2]))
    assert out.isfinite().all()
    torch.testing.assert_close(out.sum(1), torch.ones(3))
