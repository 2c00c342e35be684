"""Decoupled statistics against statistics mixed by hand, layer by layer."""

import copy

import pytest
import torch

from tests.toys import CLASSES, make_batches, make_net, same
from twoshift import estimators
from twoshift.adapters import attach, logit_adapter, rescore
from twoshift.errors import ModelError, SettingError
from twoshift.methods import BNStats, LabelAware, Source, create

SIZES = (8, 5, 2, 8, 3, 9, 8, 4, 7, 6)


def mixed_by_hand(net, share):
    """Every layer's statistics are replaced by the mix when its input comes, in evaluation mode."""
    slow = copy.deepcopy(net).eval()
    for layer in [m for m in slow.modules() if hasattr(m, "running_mean")]:
        source = layer.running_mean.clone(), layer.running_var.clone()

        def mix(layer, args, source=source):
            for c in range(layer.num_features):
                values = args[0][:, c].double()
                mean = values.mean()
                var = ((values - mean) ** 2).mean()
                layer.running_mean[c] = (1 - share) * source[0][c] + share * mean
                layer.running_var[c] = (1 - share) * source[1][c] + share * var

        layer.register_forward_pre_hook(mix)
    return slow


@pytest.mark.parametrize("name", ["resnet_bn", "mlp"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_prediction_is_normalised_by_the_mix(name, share):
    net = make_net(name)
    live, slow = create("decoupled", net, share=share), mixed_by_hand(net, share)
    for x in make_batches(name, SIZES):
        with torch.no_grad():
            torch.testing.assert_close(live(x), slow(x), rtol=1e-4, atol=1e-5)


def test_the_ends_are_the_source_model_and_batch_statistics():
    net, (x,) = make_net("resnet_bn"), make_batches("resnet_bn", (8,))
    for share, other in ((0.0, Source), (1.0, BNStats)):
        live = create("decoupled", net, share=share)
        torch.testing.assert_close(live(x), other(net)(x), rtol=1e-4, atol=1e-5)


def test_labels_are_read_from_the_other_pass():
    net = make_net("resnet_bn")
    method = create("decoupled", attach(net, logit_adapter(net)), share=0.8, label_share=0.1)
    live = LabelAware(method, estimators.create("em", CLASSES))
    predicts, reads = mixed_by_hand(net, 0.8), mixed_by_hand(net, 0.1)
    by_hand = estimators.create("em", CLASSES)
    for x in make_batches("resnet_bn", SIZES):
        with torch.no_grad():
            expected = predicts(x) + by_hand.prior.log()
            by_hand.update(reads(x).softmax(1))
        torch.testing.assert_close(live(x), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(live.prior, by_hand.prior, rtol=1e-3, atol=1e-4)


def test_the_second_pass_is_made_only_with_an_adapter():
    net, (x,) = make_net("mlp"), make_batches("mlp", (8,))
    for model, passes in ((net, 1), (attach(net, logit_adapter(net)), 2)):
        live, calls = create("decoupled", model), []
        live.model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        scores = live.adapt(x)
        assert len(calls) == passes
        assert (scores.raw is scores.logits) == (passes == 1)


def test_nothing_of_the_model_moves():
    live = create("decoupled", make_net("resnet_bn"))
    before = live.state()
    for x in make_batches("resnet_bn", SIZES):
        live(x)
    assert same(live.state(), before)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ModelError, match="IABN"):
        create("decoupled", make_net("resnet_iabn"))
    for wrong in ({"share": -0.1}, {"label_share": 1.1}):
        with pytest.raises(SettingError):
            create("decoupled", make_net("resnet_bn"), **wrong)


@pytest.mark.parametrize("parts", [1, 2])
def test_scoring_again_is_of_the_pass_that_predicts(parts):
    """Not of the other one, whose logits are for estimators only."""
    net, (x,) = make_net("resnet_bn"), make_batches("resnet_bn", (8,))
    adapted = attach(net, logit_adapter(net, temperature=1.5))
    live = create("decoupled", adapted, share=0.8, label_share=0.0)
    scores = live.adapt(x)
    assert not torch.allclose(scores.raw / 1.5, scores.logits, atol=0.1)
    again = [rescore(live.model, part) for part in scores.split(8 // parts)]
    torch.testing.assert_close(type(scores).cat(again).logits, scores.logits)
