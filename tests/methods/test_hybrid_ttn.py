"""Hybrid-TTN against statistics that are chosen channel by channel."""

import copy

import pytest
import torch
from torch import nn

from tests.toys import CLASSES, make_batches, make_moments, make_net
from twoshift.adapters import attach, logit_adapter
from twoshift.errors import ModelError, SettingError, TwoshiftError
from twoshift.estimators import EM
from twoshift.methods import BNStats, HybridTTN, LabelAware, Source, create
from twoshift.methods.hybrid_ttn import HybridNorm
from twoshift.testing import check_method

SIZES = (8, 5, 2, 8, 1, 9, 8, 4, 7, 6)
NETS = ["resnet_bn", "mlp"]
SHARES = [0.4, 0.3, 0.2, 0.1, 0.0]


def norms(net):
    return {n: m for n, m in net.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def squared_distance(mean, var, other_mean, other_var):
    return float((mean - other_mean) ** 2 + var + other_var - 2 * (var * other_var) ** 0.5)


def by_hand(net, moments, score, labels="counted", half_life=1000.0, pseudo_count=10.0):
    """Predicts one batch after the other, keeping its own list of what it predicted."""
    history = []

    def weights():
        if not isinstance(labels, str):
            return labels
        counts = [1.0 if labels == "uniform" else pseudo_count] * CLASSES
        later = 0
        for votes in reversed(history if labels == "counted" else []):
            for k in votes:
                counts[k] += 0.5 ** (later / half_life)
            later += len(votes)
        return [count / sum(counts) for count in counts]

    def predict(x):
        slow, q = copy.deepcopy(net).eval(), weights()
        layers = norms(slow)
        for depth, (name, layer) in enumerate(layers.items()):
            share = 1 - depth / (len(layers) - 1)
            count = int(share * layer.num_features + 1e-9)

            def choose(layer, args, name=name, count=count):
                (values,) = args
                if values.numel() == values.shape[1]:
                    return
                scores, found = [], []
                for c in range(layer.num_features):
                    mean, var = values[:, c].mean(), values[:, c].var(correction=0)
                    running = layer.running_mean[c], layer.running_var[c]
                    found.append((mean, var))
                    if score == "batch":
                        scores.append(squared_distance(*running, mean, var))
                    else:
                        each = torch.as_tensor(moments[name]).double()[:, :, c]
                        scores.append(
                            sum(
                                q[k] * squared_distance(*each[:, k], *running)
                                for k in range(CLASSES)
                            )
                        )
                for c in sorted(range(len(scores)), key=lambda c: scores[c])[:count]:
                    layer.running_mean[c], layer.running_var[c] = found[c]

            layer.register_forward_pre_hook(choose)
        with torch.no_grad():
            logits = slow(x)
        history.append(logits.argmax(1).tolist())
        return logits

    return predict, weights


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(
    "settings",
    [
        {"score": "batch"},
        {"score": "classes", "labels": "counted", "half_life": 6.0, "pseudo_count": 0.2},
        {"score": "classes", "labels": "uniform"},
        {"score": "classes", "labels": SHARES},
    ],
    ids=["batch", "counted", "uniform", "given"],
)
def test_against_channels_chosen_one_by_one(name, settings):
    net = make_net(name).double()
    moments = make_moments(net)
    live = HybridTTN(net, moments, **settings)
    predict, weights = by_hand(net, moments, **settings)
    others = [BNStats(net), Source(net)]
    for x in make_batches(name, SIZES):
        x = x.double()
        logits = live(x)
        torch.testing.assert_close(logits, predict(x), rtol=1e-6, atol=1e-6)
        if len(x) > 1:
            assert not any(torch.allclose(logits, other(x), atol=1e-3) for other in others)
        if settings["score"] == "classes":
            expected = torch.tensor(weights(), dtype=live.prior.dtype)
            torch.testing.assert_close(live.prior, expected, rtol=1e-5, atol=1e-6)


def test_the_distance_of_the_batch_keeps_the_contract():
    """The other one is in the tests of all methods."""
    check_method(HybridTTN, make_net("resnet_bn"))


def test_labels_decide_which_channels_adapt():
    net = make_net("resnet_bn")
    moments, (x,) = make_moments(net), make_batches("resnet_bn", (8,))
    one_class = [[float(k == c) for k in range(CLASSES)] for c in range(2)]
    first, second = (HybridTTN(net, moments, "classes", labels) for labels in one_class)
    assert not torch.allclose(first(x), second(x), atol=1e-3)
    assert not first.counts.any()  # nothing to count


@pytest.mark.parametrize("layers", [1, 2, 6])
def test_the_share_falls_from_all_to_none(layers):
    stack = [part for _ in range(layers) for part in (nn.BatchNorm1d(10), nn.Linear(10, 10))]
    live = HybridTTN(nn.Sequential(*stack, nn.Linear(10, CLASSES)))
    got = [m.adapted for m in live.model.modules() if isinstance(m, HybridNorm)]
    # 1 - 4/5 of 10 channels are 2, not the 1 that rounding makes of it
    assert got == {1: [10], 2: [10, 0], 6: [10, 8, 6, 4, 2, 0]}[layers]


def test_a_single_layer_is_normalised_by_the_batch():
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, CLASSES)).eval()
    x = torch.rand(6, 3, 2, 2)
    torch.testing.assert_close(HybridTTN(net)(x), BNStats(net)(x))
    torch.testing.assert_close(HybridTTN(net)(x[:1]), Source(net)(x[:1]))


def test_classes_are_counted_before_the_adapter_adjusts_them():
    net, shares = make_net("resnet_bn"), [0.6, 0.2, 0.1, 0.07, 0.03]
    moments, fair = make_moments(net), copy.deepcopy(net)
    with torch.no_grad():
        fair.fc.bias -= torch.tensor(shares).log()
    adapted = attach(net, logit_adapter(net, assumes=shares))
    live = LabelAware(HybridTTN(adapted, moments, "classes"), EM(CLASSES, pseudo_count=0.1))
    plain, biased = (HybridTTN(n, moments, "classes") for n in (fair, net))
    for x in make_batches("resnet_bn", SIZES):
        live(x)
        plain(x)
        biased(x)
        assert torch.equal(live.method.prior, plain.prior)
    assert not torch.allclose(biased.prior, plain.prior, atol=1e-2)
    assert not torch.allclose(live.prior, plain.prior, atol=1e-2)  # the estimator's is another


def test_moments_are_not_used_where_the_batch_decides():
    net, batches = make_net("mlp"), make_batches("mlp")
    with_moments, without = HybridTTN(net, make_moments(net)), HybridTTN(net)
    assert all(torch.equal(with_moments(x), without(x)) for x in batches)


def test_what_it_cannot_do_is_refused():
    net = make_net("resnet_bn")
    moments = make_moments(net)
    with pytest.raises(ModelError, match="IABN"):
        HybridTTN(make_net("resnet_iabn"))
    with pytest.raises(SettingError, match="moments of hybrid_ttn, must be given"):
        HybridTTN(net, score="classes")
    with pytest.raises(SettingError, match="moments of bn1"):
        create("hybrid_ttn", net, score="classes", moments={})
    for wrong, message in [
        ({"score": "class"}, "one of 'batch', 'classes'"),
        ({"labels": "count"}, "one of 'counted', 'uniform'"),
        ({"labels": [0.5, 0.5]}, "labels of hybrid_ttn"),
        ({"labels": [0.5] * CLASSES}, "labels of hybrid_ttn"),
        ({"half_life": 0}, "half_life"),
        ({"pseudo_count": -1}, "pseudo_count"),
    ]:
        with pytest.raises(TwoshiftError, match=message):
            HybridTTN(net, **{"moments": moments, "score": "classes", **wrong})
