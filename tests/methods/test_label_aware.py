"""LabelAware: condition on the estimate so far, predict and adapt, then estimate."""

import numpy as np
import pytest
import torch

from tests.methods import slow
from tests.toys import CLASSES, make_adapter, make_batches, make_net, same
from twoshift.adapters import adapted_heads, attach, condition
from twoshift.errors import HeadError, MismatchError
from twoshift.estimators import EMA, Fixed
from twoshift.methods import IABN, LabelAware, Source, Tent
from twoshift.models.head import find_head
from twoshift.models.norm import replace_module
from twoshift.priors import longtail

SIZES = (8, 5, 8, 3, 8, 8, 6, 8, 2, 8, 7)


def with_adapter(name):
    net = make_net(name)
    return attach(net, make_adapter(net))


@pytest.mark.parametrize("name", ["resnet_bn", "vit", "mlp"])
def test_against_a_plain_loop(name):
    """TENT, the full W + dW, and a moving average in numpy."""
    lr, alpha, net = 2e-3, 0.2, make_net(name)
    path, head = find_head(net)
    slow_head = slow.FullMatrixHead(head, make_adapter(net), CLASSES)
    replace_module(net, path, slow_head)
    slow.batch_norms_in_training(net)
    parameters = list(slow.affine(net).values())
    optimizer, estimate = slow.Adam(parameters, lr), np.full(CLASSES, 1 / CLASSES)
    live = LabelAware(Tent(with_adapter(name), lr=lr), EMA(CLASSES, alpha=alpha))
    for x in make_batches(name, SIZES):
        slow_head.prior = torch.from_numpy(estimate).float()
        expected = slow.step(net, x, parameters, optimizer)
        estimate = alpha * expected.softmax(1).mean(0).numpy() + (1 - alpha) * estimate
        torch.testing.assert_close(live(x), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(live.prior.numpy(), estimate, atol=1e-6)
    moved = slow.affine(live.model)
    for place, wanted in slow.affine(net).items():
        torch.testing.assert_close(moved[place], wanted, rtol=1e-5, atol=1e-5)
    assert np.abs(estimate - 1 / CLASSES).max() > 0.02


@pytest.mark.parametrize(("kind", "name"), [(Source, "vit"), (IABN, "resnet_iabn")])
def test_any_method_is_conditioned_before_and_estimated_after(kind, name):
    live, by_hand = LabelAware(kind(with_adapter(name)), EMA(CLASSES)), kind(with_adapter(name))
    estimator = EMA(CLASSES)
    for x in make_batches(name):
        condition(by_hand, estimator.prior)
        logits = by_hand(x)
        estimator.update(logits.softmax(1))
        assert torch.equal(live(x), logits)
        assert torch.equal(live.prior, estimator.prior)


def test_a_fixed_estimate_is_told_from_the_first_batch_on():
    prior, x = longtail(CLASSES, 20), make_batches("mlp")[0]
    live = LabelAware(Source(with_adapter("mlp")), Fixed(CLASSES, prior))
    by_hand = with_adapter("mlp").eval()
    uniform = by_hand(x)
    condition(by_hand, prior)
    assert torch.equal(live(x), by_hand(x))
    assert not torch.allclose(uniform, by_hand(x), atol=1e-3)
    live.reset()
    np.testing.assert_allclose(live.method.model.head.prior.numpy(), prior, rtol=1e-6)


def test_a_fresh_adapter_changes_nothing():
    net = make_net("resnet_bn")
    adapter = make_adapter(net)
    for network in (adapter.feature_net, adapter.head_net):
        for parameter in network[-1].parameters():
            parameter.data.zero_()
    live = LabelAware(Tent(attach(net, adapter)), EMA(CLASSES))
    plain = Tent(net)
    for x in make_batches("resnet_bn"):
        torch.testing.assert_close(live(x), plain(x), rtol=1e-4, atol=1e-4)


def test_no_second_copy_of_the_model():
    inner = Tent(with_adapter("mlp"))
    live = LabelAware(inner, EMA(CLASSES))
    assert live.model is inner.model
    assert sum(1 for _ in adapted_heads(live)) == 1


def test_reset_takes_the_estimate_and_the_moments_along():
    live = LabelAware(Tent(with_adapter("mlp")), EMA(CLASSES))
    first = live.state()
    for x in make_batches("mlp"):
        live(x)
    assert live.method.optimizer.state
    live.reset()
    assert same(live.state(), first)
    assert not live.method.optimizer.state
    assert torch.equal(live.prior, torch.full((CLASSES,), 1 / CLASSES))
    assert torch.equal(live.model.head.prior, live.prior)


def test_no_gradient_flows_through_the_estimate():
    live = LabelAware(Tent(with_adapter("mlp")), EMA(CLASSES))
    live(make_batches("mlp")[0])
    assert not live.prior.requires_grad
    assert not live.model.head.prior.requires_grad


def test_a_model_without_an_adapter():
    with pytest.raises(HeadError, match=r"no adapter.*before building the method"):
        LabelAware(Tent(make_net("mlp")), EMA(CLASSES))


def test_an_estimator_of_another_number_of_classes():
    with pytest.raises(MismatchError, match=f"for {CLASSES} classes, got {CLASSES + 1}"):
        LabelAware(Tent(with_adapter("mlp")), EMA(CLASSES + 1))


def test_a_state_of_another_method_is_refused_and_changes_nothing():
    live = LabelAware(Tent(with_adapter("mlp")), EMA(CLASSES))
    for x in make_batches("mlp"):
        live(x)
    before = live.state()
    other = LabelAware(Tent(with_adapter("resnet_bn")), EMA(CLASSES))
    for state in (other.state(), {}, Tent(with_adapter("mlp")).state()):
        with pytest.raises(MismatchError):
            live.load_state(state)
        assert same(live.state(), before)
