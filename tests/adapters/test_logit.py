"""Logit adjustment as an adapter, plain and calibrated, against its formula and Bayes' rule."""

import math

import pytest
import torch
from torch import nn

from tests.adapters import slow
from tests.adapters.slow import PRIOR, C, D
from tests.toys import make_adapter, make_net
from twoshift.adapters import (
    CalibratedAdapter,
    LogitAdapter,
    attach,
    condition,
    logit_adapter,
    shifted_logits,
)
from twoshift.errors import HeadError, PriorError, SettingError
from twoshift.priors import longtail

SHARES = [0.4, 0.3, 0.2, 0.1]
MAKE = {
    "logit": LogitAdapter,
    "calibrated": lambda *size, **settings: CalibratedAdapter(*size, **settings, temperature=1.7),
}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("assumes", [None, SHARES])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_the_formula(kind, assumes, bias):
    adapter = MAKE[kind](D, C, assumes=assumes)
    h, weight, own_bias = torch.randn(3, D), torch.randn(C, D), torch.randn(C) if bias else None
    logits = shifted_logits(h, weight, own_bias, adapter(PRIOR))
    expected = slow.logit_logits(adapter, PRIOR, h, weight, own_bias)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_it_adds_to_the_logits_after_the_linear_layer():
    """Bit for bit: the published numbers were measured this way."""
    net, x = make_net("mlp"), torch.rand(8, 3, 8, 8)
    prior = torch.from_numpy(longtail(5, 20)).float()
    adapted = attach(net, logit_adapter(net))
    condition(adapted, prior)
    with torch.no_grad():
        assert torch.equal(adapted(x), net(x) + prior.log())


@pytest.mark.parametrize("kind", MAKE)
def test_a_share_of_zero_is_not_infinite(kind):
    for assumes in (None, [1.0, 0, 0, 0]):
        shift = MAKE[kind](D, C, assumes=assumes)(torch.tensor([1.0, 0, 0, 0]))
        assert shift.logits.isfinite().all()
    shift = MAKE[kind](D, C)(torch.tensor([1.0, 0, 0, 0]))
    assert shift.logits.tolist() == pytest.approx([0] + [math.log(1e-6)] * 3)


@pytest.mark.parametrize("assumes", [None, SHARES])
def test_unbiased_removes_what_the_logits_contain(assumes):
    raw = torch.randn(3, C)
    log = 0 if assumes is None else torch.tensor(SHARES).log()
    torch.testing.assert_close(LogitAdapter(D, C, assumes=assumes).unbiased(raw), raw - log)
    calibrated = CalibratedAdapter(D, C, assumes=assumes, temperature=1.7)
    torch.testing.assert_close(calibrated.unbiased(raw), raw / 1.7 - log)


def test_a_temperature_of_one_is_the_plain_adapter():
    plain, calibrated = (
        LogitAdapter(D, C, assumes=SHARES),
        CalibratedAdapter(D, C, assumes=SHARES, temperature=1.0),
    )
    h, weight, bias = torch.randn(3, D), torch.randn(C, D), torch.randn(C)
    one, two = (shifted_logits(h, weight, bias, a(PRIOR)) for a in (plain, calibrated))
    assert torch.equal(one, two)


def test_it_has_no_weights():
    for adapter in (LogitAdapter(D, C), CalibratedAdapter(D, C, temperature=2.0)):
        assert not list(adapter.parameters())
        assert list(adapter.state_dict()) == ["mapping"]
        assert not adapter.needs_training


def gaussian_classifier(means, prior):
    """Exact log-densities of unit Gaussians, up to what all classes share, plus a log prior."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(*reversed(means.shape)))
    with torch.no_grad():
        net[1].weight.copy_(means)
        net[1].bias.copy_(-0.5 * means.square().sum(1) + prior.log())
    return net.double()


@pytest.mark.parametrize("assumes", [None, [0.4, 0.3, 0.15, 0.1, 0.05]])
@pytest.mark.parametrize("temperature", [None, 2.5])
def test_it_is_the_bayes_rule_for_the_target(assumes, temperature):
    g, target = torch.Generator().manual_seed(0), [0.05, 0.05, 0.1, 0.2, 0.6]
    means, x = torch.randn(5, 12, generator=g).double(), torch.randn(50, 12, generator=g).double()
    model = gaussian_classifier(means, torch.tensor(assumes or [0.2] * 5, dtype=torch.float64))
    with torch.no_grad():
        for parameter in model.parameters():  # too sure of itself, unless it is calibrated
            parameter.mul_(temperature or 1.0)
    adapted = attach(model, logit_adapter(model, assumes, temperature=temperature))
    condition(adapted, target)
    for row, point in zip(adapted(x).softmax(1), x, strict=True):
        joint = [
            p * math.exp(-0.5 * float((point - m).square().sum()))
            for p, m in zip(target, means, strict=True)
        ]
        wanted = [j / sum(joint) for j in joint]
        assert row.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-9)


def test_logit_adapter_fits_the_head_of_a_model():
    net = make_net("resnet_bn")
    plain = logit_adapter(net, class_counts=[5, 4, 3, 2, 1])
    assert type(plain) is LogitAdapter
    assert (plain.features, plain.classes) == (net.fc.in_features, 5)
    assert plain.class_counts == [5, 4, 3, 2, 1]
    calibrated = logit_adapter(net, assumes=[0.2] * 5, temperature=1.5)
    assert type(calibrated) is CalibratedAdapter
    assert calibrated.temperature == 1.5
    with pytest.raises(HeadError, match="has an adapter already"):
        logit_adapter(attach(net, make_adapter(net)))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_bad_temperatures(temperature):
    with pytest.raises(SettingError, match="temperature of the adapter, must be above 0"):
        CalibratedAdapter(D, C, temperature=temperature)


def test_bad_assumptions():
    for assumes in ([0.5, 0.5], [1.0, 1, 1, 1], [1.2, -0.2, 0, 0]):
        with pytest.raises(PriorError, match="assumes of the adapter"):
            LogitAdapter(D, C, assumes=assumes)
