"""The recommended combination against the same parts put together by hand."""

import copy

import pytest
import torch

from tests.toys import CLASSES, make_batches, make_moments, make_net
from twoshift import EM, LabelAware, Matched, attach, logit_adapter, recommended
from twoshift.errors import HeadError, SettingError
from twoshift.models.head import find_head

SIZES = (8, 5, 8, 3, 9)
PRIOR = [0.4, 0.3, 0.15, 0.1, 0.05]


@pytest.mark.parametrize("trained_plainly", [False, True])
@pytest.mark.parametrize("bias", [None, [0.3, -0.3, 0.1, -0.1, 0.0]])
def test_it_is_its_parts(trained_plainly, bias):
    net = make_net("resnet_bn")
    moments, prior = make_moments(net), PRIOR if trained_plainly else None
    live = recommended(
        net, moments, temperature=1.5, bias=bias, source_prior=prior, share=0.3, half_life=50.0
    )
    in_logits = torch.tensor(prior).log() if prior else torch.zeros(CLASSES)
    fair = copy.deepcopy(net)  # its logits favour no class, so its votes do not
    with torch.no_grad():
        find_head(fair)[1].bias -= 1.5 * in_logits
    raw = Matched(fair, moments, share=0.3, half_life=50.0)
    assumed = prior if bias is None else None
    estimate = EM(CLASSES, model_prior=assumed, temperature=1.5, bias=bias)
    for x in make_batches("resnet_bn", SIZES):
        logits = raw(x)
        expected = logits / 1.5 + estimate.prior.log()
        estimate.update((logits + 1.5 * in_logits).softmax(1))
        torch.testing.assert_close(live(x), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(live.prior, estimate.prior, rtol=1e-3, atol=1e-5)


def test_without_a_calibration_the_temperature_is_one():
    net, x = make_net("mlp"), make_batches("mlp")[0]
    live = recommended(net, make_moments(net))
    by_hand = LabelAware(Matched(attach(net, logit_adapter(net)), make_moments(net)), EM(CLASSES))
    assert torch.equal(live(x), by_hand(x))
    assert torch.equal(live.prior, by_hand.prior)


def test_it_is_saved_and_goes_on(tmp_path):
    net = make_net("resnet_bn")
    live = recommended(net, make_moments(net), temperature=1.7)
    first, second, third = make_batches("resnet_bn", (8, 5, 8))
    live(first)
    live(second)
    live.save(tmp_path / "state")
    again = LabelAware.load(tmp_path / "state", net)
    assert torch.equal(again(third), live(third))
    assert torch.equal(again.prior, live.prior)


def test_the_adapter_is_logit_adjustment():
    net, (x,) = make_net("mlp"), make_batches("mlp", (8,))
    adapted = attach(net, logit_adapter(net))
    live = LabelAware(Matched(adapted, make_moments(net), share=0.0), EM(CLASSES))
    with torch.no_grad():
        torch.testing.assert_close(live(x).log_softmax(1), net(x).log_softmax(1))


def test_a_wrong_setting_is_refused():
    net = make_net("resnet_bn")
    with pytest.raises(SettingError, match="share of matched"):
        recommended(net, make_moments(net), share=2.0)


def test_a_model_with_an_adapter_is_refused():
    net = make_net("resnet_bn")
    adapted = attach(net, logit_adapter(net))
    with pytest.raises(HeadError, match="an adapter already"):
        recommended(adapted, make_moments(net))
