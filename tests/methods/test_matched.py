"""Matched statistics against statistics taken apart by hand, layer by layer and class by class."""

import copy

import pytest
import torch
from torch import nn

from tests.toys import CLASSES, make_batches, make_moments, make_net, same
from twoshift import estimators
from twoshift.adapters import attach, logit_adapter
from twoshift.errors import BatchError, ModelError, SettingError
from twoshift.methods import BNStats, LabelAware, Source, create, matched
from twoshift.methods.matched import class_moments

SIZES = (8, 5, 2, 8, 3, 9, 8, 4, 7, 6)
NETS = ["resnet_bn", "mlp"]


def labelled(name, sizes=(10, 15, 5)):
    return [(x, torch.arange(len(x)) % CLASSES) for x in make_batches(name, sizes, seed=5)]


def norms(net):
    return {n: m for n, m in net.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def matched_by_hand(net, moments, share, half_life=421.0, pseudo_count=1.0):
    """Predicts one batch after the other, keeping its own list of what it predicted."""
    history = []

    def prior():
        weights = torch.full((CLASSES,), float(pseudo_count)).double()
        later = 0
        for votes in reversed(history):
            for c in votes:
                weights[c] += 0.5 ** (later / half_life)
            later += len(votes)
        return weights / weights.sum()

    def predict(x):
        slow, q = copy.deepcopy(net).eval(), prior()
        for name, layer in norms(slow).items():

            def match(layer, args, name=name):
                means, variances = (torch.as_tensor(m).double() for m in moments[name])
                for c in range(layer.num_features):
                    values = args[0][:, c].double()
                    mean, var = values.mean(), values.var(correction=0)
                    now = sum(q[k] * means[k, c] for k in range(CLASSES))
                    square = sum(
                        q[k] * (variances[k, c] + means[k, c] ** 2) for k in range(CLASSES)
                    )
                    ratio = ((var + layer.eps) / (square - now**2 + layer.eps)).sqrt()
                    then, spread = layer.running_mean[c].double(), layer.running_var[c].double()
                    layer.running_mean[c] = (1 - share) * then + share * (
                        mean + ratio * (then - now)
                    )
                    layer.running_var[c] = (1 - share) * spread + share * ratio**2 * spread

            layer.register_forward_pre_hook(match)
        with torch.no_grad():
            logits = slow(x)
        history.append(logits.argmax(1).tolist())
        return logits

    return predict, prior


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_batch_is_compared_with_source_images_of_the_predicted_labels(name, share):
    net = make_net(name)
    moments = make_moments(net)
    live = create("matched", net, moments=moments, share=share, half_life=20.0, pseudo_count=0.5)
    by_hand, prior = matched_by_hand(net, moments, share, 20.0, 0.5)
    for x in make_batches(name, SIZES):
        torch.testing.assert_close(live(x), by_hand(x), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(live.prior.double(), prior(), rtol=1e-5, atol=1e-6)


def test_without_the_batch_it_is_the_source_model():
    net, (x,) = make_net("resnet_bn"), make_batches("resnet_bn", (8,))
    live = create("matched", net, moments=make_moments(net), share=0.0)
    torch.testing.assert_close(live(x), Source(net)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETS)
def test_on_source_images_nothing_changes_whatever_their_labels(name):
    """Batch statistics alone would take the labels for a change of appearance."""
    net, ((images, labels),) = make_net(name), labelled(name, (25,))
    x = torch.cat([images[labels == c] for c in (0, 0, 0, 1)])
    moments = class_moments(net, [(images, labels)])
    live = create("matched", net, moments=moments, share=1.0, pseudo_count=1e-6)
    live.counts.copy_(torch.tensor([3.0, 1, 0, 0, 0]))
    expected = Source(net)(x)
    assert (BNStats(net)(x) - expected).abs().max() > 0.1
    torch.testing.assert_close(live(x), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NETS)
def test_moments_are_those_of_each_class(name):
    net = make_net(name)
    batches = labelled(name)
    moments = class_moments(net, batches)
    images, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    inputs = {}
    slow = copy.deepcopy(net)
    for layer_name, layer in norms(slow).items():
        layer.register_forward_pre_hook(lambda _l, args, n=layer_name: inputs.update({n: args[0]}))
    with torch.no_grad():
        slow(images)
    assert set(moments) == set(inputs)
    for layer_name, values in inputs.items():
        for k in range(CLASSES):
            mine = values[labels == k].double().transpose(0, 1).flatten(1)
            mean, var = (m[k].double() for m in moments[layer_name])
            torch.testing.assert_close(mean, mine.mean(1), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(var, mine.var(1, correction=0), rtol=1e-3, atol=1e-5)


def test_moments_leave_the_model_as_it_was_and_fit_it_with_an_adapter():
    net = make_net("resnet_bn").train()
    before = copy.deepcopy(net.state_dict())
    moments = class_moments(net, labelled("resnet_bn"))
    assert net.training
    assert same(dict(net.state_dict()), dict(before))
    net.eval()
    live = LabelAware(
        create("matched", attach(net, logit_adapter(net)), moments=moments),
        estimators.create("em", CLASSES),
    )
    plain, by_hand = create("matched", net, moments=moments), estimators.create("em", CLASSES)
    for x in make_batches("resnet_bn", SIZES):
        raw = plain(x)  # counts and estimate follow the predictions before the adjustment
        expected = raw + by_hand.prior.log()
        by_hand.update(raw.softmax(1))
        torch.testing.assert_close(live(x), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(live.method.counts, plain.counts)


@pytest.mark.parametrize("temperature", [None, 1.7])
def test_labels_are_counted_without_the_distribution_that_the_logits_contain(temperature):
    """A head trained by cross-entropy votes like one whose bias holds no log prior."""
    net, shares = make_net("resnet_bn"), [0.6, 0.2, 0.1, 0.07, 0.03]
    moments, batches = make_moments(net), make_batches("resnet_bn", SIZES)
    adapter = logit_adapter(net, assumes=shares, temperature=temperature)
    live = create("matched", attach(net, adapter), moments=moments)
    fair = copy.deepcopy(net)
    with torch.no_grad():
        fair.fc.bias -= (temperature or 1.0) * torch.tensor(shares).log()
    by_hand, prior = matched_by_hand(fair, moments, 0.5)
    plain = create("matched", net, moments=moments)
    for x in batches:
        live(x)
        by_hand(x)
        plain(x)
        torch.testing.assert_close(live.prior.double(), prior(), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(plain.prior, live.prior, atol=1e-2)


def test_moments_may_be_lists():
    net, batches = make_net("mlp"), make_batches("mlp")
    moments = {name: torch.tensor(values) for name, values in make_moments(net).items()}
    lists = create("matched", net, moments={name: m.tolist() for name, m in moments.items()})
    tensors = create("matched", net, moments=moments)
    for x in batches:
        assert torch.equal(lists(x), tensors(x))
    assert same(lists.settings()["moments"], tensors.settings()["moments"])


@pytest.mark.parametrize("name", NETS)
def test_large_moments_are_not_held_a_second_time(name, monkeypatch):
    net = make_net(name)
    moments = class_moments(net, labelled(name))
    whole = create("matched", net, moments=moments)
    monkeypatch.setattr(matched, "LARGEST_PART", 1)
    in_parts = create("matched", net, moments=moments)
    given = {t.untyped_storage().data_ptr() for t in moments.values()}
    assert {part.untyped_storage().data_ptr() for part in in_parts._source._parts} == given
    for x in make_batches(name, SIZES):
        torch.testing.assert_close(in_parts(x), whole(x))
    assert torch.equal(in_parts.counts, whole.counts)


def test_a_class_without_images_has_no_moments():
    batches = [(x, y.clamp(max=CLASSES - 2)) for x, y in labelled("mlp")]
    with pytest.raises(BatchError, match=f"none of class {CLASSES - 1}"):
        class_moments(make_net("mlp"), batches)


def test_what_it_cannot_do_is_refused():
    net = make_net("resnet_bn")
    moments = make_moments(net)
    with pytest.raises(ModelError, match="IABN"):
        create("matched", make_net("resnet_iabn"), moments=moments)
    with pytest.raises(SettingError, match="twoshift calibrate"):
        create("matched", net)
    with pytest.raises(SettingError, match="moments of bn1"):
        create("matched", net, moments={k: v for k, v in moments.items() if k != "bn1"})
    for wrong in ({"share": 1.1}, {"half_life": 0}, {"pseudo_count": 0}):
        with pytest.raises(SettingError):
            create("matched", net, moments=moments, **wrong)
    untracked = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    untracked.append(nn.Linear(4, CLASSES))
    for name in ("matched", "decoupled"):
        with pytest.raises(ModelError, match="track_running_stats=False"):
            create(name, untracked)
    with pytest.raises(ModelError, match="track_running_stats=False"):
        class_moments(untracked, [])


class Residual(nn.Module):
    """A network that writes into what its batch normalisation was given, or does not."""

    def __init__(self, in_place, calls=1, spare=False):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.bn, self.fc = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)
        self.in_place, self.calls = in_place, calls
        if spare:
            self.spare = nn.BatchNorm1d(4)

    def forward(self, x):
        h = self.stem(x)
        for _ in range(self.calls):
            y = self.bn(h).relu()
            h = h.add_(y) if self.in_place else h + y
        return self.fc(h)


def vectors():
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(2 * CLASSES, 6, generator=g), torch.arange(2 * CLASSES) % CLASSES)]


def test_moments_are_of_what_the_layer_was_given_even_if_it_is_written_over():
    apart, in_place = (class_moments(Residual(p), vectors()) for p in (False, True))
    assert same(apart, in_place)


def test_moments_of_a_layer_that_is_used_twice_are_those_of_both_times():
    ((x, labels),) = vectors()
    net = Residual(False, calls=2).eval()
    moments = class_moments(net, vectors())
    with torch.no_grad():
        first = net.stem(x)
        second = first + net.bn(first).relu()
    for k in range(CLASSES):
        values = torch.cat([first[labels == k], second[labels == k]]).double()
        mean, var = (m[k].double() for m in moments["bn"])
        torch.testing.assert_close(mean, values.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(var, values.var(0, correction=0), rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_never_used_is_named():
    with pytest.raises(ModelError, match="'spare', must be used in evaluation mode"):
        class_moments(Residual(False, spare=True), vectors())
