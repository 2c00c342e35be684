"""DELTA against a plain loop around slow renormalisation layers."""

import math

import pytest
import torch
from torch import nn

from tests.methods import slow
from tests.toys import CLASSES, make_batches, make_net, same
from twoshift.adapters import Scores
from twoshift.errors import ModelError, SettingError
from twoshift.methods import BNStats, Tent
from twoshift.methods.delta import DELTA, BatchRenorm
from twoshift.models.norm import batch_norms, replace_module

SIZES = (8, 5, 8, 3, 8, 8, 6, 1, 2, 8, 7)


class SlowRenorm(nn.Module):
    """One channel at a time; torch differentiates through the batch's statistics."""

    def __init__(self, layer, momentum):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.source = layer.running_mean, layer.running_var
        self.eps, self.momentum, self.mean, self.std = layer.eps, momentum, None, None

    def forward(self, x):
        channels = [x[:, c] for c in range(x.shape[1])]
        if channels[0].numel() == 1:
            mean, var = self.source
            y = [
                (v - m) / (s + self.eps) ** 0.5 for v, m, s in zip(channels, mean, var, strict=True)
            ]
        else:
            means = [v.sum() / v.numel() for v in channels]
            stds = [
                (((v - m) ** 2).sum() / v.numel() + self.eps) ** 0.5
                for v, m in zip(channels, means, strict=True)
            ]
            now = [m.detach() for m in means], [s.detach() for s in stds]
            if self.mean is None:
                self.mean, self.std = now
            y = [
                (channels[c] - means[c]) / stds[c] * (now[1][c] / self.std[c])
                + (now[0][c] - self.mean[c]) / self.std[c]
                for c in range(len(channels))
            ]
            self.mean = [self._mix(a, b) for a, b in zip(self.mean, now[0], strict=True)]
            self.std = [self._mix(a, b) for a, b in zip(self.std, now[1], strict=True)]
        y = [v * w + b for v, w, b in zip(y, self.weight, self.bias, strict=True)]
        return torch.stack(y, 1)

    def _mix(self, old, new):
        return (1 - self.momentum) * old + self.momentum * new


def run_by_hand(net, batches, lr, statistics_momentum, class_momentum, weighted):
    parameters = list(slow.affine(net).values())
    for path, layer in list(batch_norms(net)):
        replace_module(net, path, SlowRenorm(layer, statistics_momentum))
    optimizer, frequencies = slow.SGD(parameters, lr), [1 / CLASSES] * CLASSES
    half, logits, left_out = 0.5 * math.log(CLASSES), [], 0
    for x in batches:
        z = net(x)
        logits.append(z.detach())
        rare = [1 / frequencies[int(row.argmax())] for row in z]
        losses = []
        for row, r in zip(z, rare, strict=True):
            h, weight = slow.mean_entropy(row[None]), r * len(rare) / sum(rare)
            sure = float(h.detach()) < half
            left_out += not sure
            if weighted and sure:
                losses.append(weight * math.exp(half - float(h.detach())) * h)
            elif not weighted:
                losses.append(weight * h)
        if losses:
            grads = torch.autograd.grad(sum(losses) / len(losses), parameters)
            optimizer.step(grads)
        for k in range(CLASSES):
            mean = sum(float(row.softmax(0)[k]) for row in z.detach()) / len(z)
            frequencies[k] = (1 - class_momentum) * frequencies[k] + class_momentum * mean
    return logits, frequencies, left_out


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("resnet_bn", {"statistics_momentum": 0.05, "class_momentum": 0.3, "weighted": False}),
        ("mlp", {"statistics_momentum": 0.3, "class_momentum": 0.05, "weighted": True}),
        ("resnet_gn", {"statistics_momentum": 0.05, "class_momentum": 0.05, "weighted": False}),
    ],
)
def test_against_a_plain_loop(name, settings):
    batches = [x.double() for x in make_batches(name, SIZES)]
    by_hand, live = make_net(name).double(), DELTA(make_net(name).double(), lr=0.02, **settings)
    logits = [live(x) for x in batches]
    expected, frequencies, left_out = run_by_hand(by_hand, batches, 0.02, **settings)
    assert left_out or not settings["weighted"]
    for got, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    moved = dict(live.model.named_parameters())
    for path, wanted in by_hand.named_parameters():
        torch.testing.assert_close(moved[path], wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(live.frequencies.tolist(), frequencies, rtol=1e-5, atol=1e-6)
    for path, layer in live.model.named_modules():
        if isinstance(layer, BatchRenorm):
            reference = by_hand.get_submodule(path)
            torch.testing.assert_close(layer.test_mean, torch.stack(reference.mean))
            torch.testing.assert_close(layer.test_std, torch.stack(reference.std))


def test_names_weights_and_source_statistics_stay():
    net = make_net("resnet_bn")
    live = DELTA(net)
    assert list(dict(live.model.named_parameters())) == list(dict(net.named_parameters()))
    for x in make_batches("resnet_bn"):
        live(x)
    state = live.model.state_dict()
    for path, buffer in net.named_buffers():
        assert torch.equal(live.model.get_buffer(path), buffer), path
    assert {n.rpartition(".")[2] for n in state.keys() - net.state_dict().keys()} == {
        "test_mean",
        "test_std",
        "seen",
    }


def test_only_norm_weights_move():
    net = make_net("resnet_bn")
    live = DELTA(net, freeze=["layer4"])
    for x in make_batches("resnet_bn"):
        live(x)
    moves, source = slow.affine(live.model, ["layer4"]), dict(net.named_parameters())
    for path, parameter in live.model.named_parameters():
        assert torch.equal(parameter, source[path]) == (path not in moves), path
        assert (parameter.grad is None) == (path not in moves), path


def test_the_first_batch_is_normalised_by_itself():
    x = make_batches("resnet_bn")[0]
    torch.testing.assert_close(DELTA(make_net("resnet_bn"))(x), BNStats(make_net("resnet_bn"))(x))


def test_statistics_that_follow_at_once_are_the_batch_before():
    layer = DELTA(make_net("resnet_bn"), statistics_momentum=1.0).model.bn1
    first, second = (
        torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(s)) for s in (0, 1)
    )
    layer(first)
    mean, std = first.mean((0, 2, 3)), (first.var((0, 2, 3), correction=0) + layer.eps).sqrt()
    expected = (second - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
    expected = expected * layer.weight.view(-1, 1, 1) + layer.bias.view(-1, 1, 1)
    torch.testing.assert_close(layer(second), expected)


def test_a_layer_without_weights():
    net = nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(12, affine=False), nn.Linear(12, 4), nn.LayerNorm(4)
    )
    live = DELTA(net)
    assert live(torch.rand(4, 3, 2, 2)).isfinite().all()
    assert bool(live.model[1].seen)


def test_a_rare_class_weighs_more():
    """Two samples of equal entropy: the gradient is that of the rare class, nearly."""
    live = DELTA(make_net("mlp"), class_momentum=0.0)
    live.frequencies.copy_(torch.tensor([0.97, 1e-6, 0.01, 0.01, 0.01]))
    losses, logits = [], torch.tensor([[5.0, 0, 0, 0, 0], [0, 5.0, 0, 0, 0]], requires_grad=True)
    live.predict, live.minimise = lambda x: Scores(logits, logits), losses.append
    live.adapt(torch.zeros(2, 3, 8, 8))
    (grad,) = torch.autograd.grad(losses[0], logits)
    assert grad[1].abs().max() > 1e4 * grad[0].abs().max()


def test_a_class_that_was_never_seen_does_no_harm():
    live = DELTA(make_net("resnet_bn"))
    live.frequencies.zero_()
    before = live.state()
    for x in make_batches("resnet_bn"):
        assert live(x).isfinite().all()
    assert all(t.isfinite().all() for t in live.state().values())
    assert not same(live.state(), before)


def test_iabn_layers_stay_and_take_the_batch_as_reference():
    x = make_batches("resnet_iabn")[0]
    live = DELTA(make_net("resnet_iabn"))
    assert not any(isinstance(layer, BatchRenorm) for layer in live.model.modules())
    assert torch.equal(live(x), Tent(make_net("resnet_iabn"))(x))


def test_no_sure_sample_no_step():
    unsure = make_net("vit")
    unsure.head.weight.data *= 0.1
    live = DELTA(unsure, weighted=True)
    before = live.state()
    for x in make_batches("vit"):
        live(x)
    changed = {n for n, t in live.state().items() if not torch.equal(t, before[n])}
    assert changed == {"frequencies"}
    assert not live.optimizer.state


def test_reset_forgets_momentum_statistics_and_frequencies():
    live, batches = DELTA(make_net("resnet_bn")), make_batches("resnet_bn")
    first = [live(x) for x in batches]
    assert live.optimizer.state
    live.reset()
    assert not live.optimizer.state
    assert not live.model.bn1.seen
    assert torch.equal(live.frequencies, torch.full((CLASSES,), 1 / CLASSES))
    assert all(torch.equal(live(x), z) for x, z in zip(batches, first, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0}, "lr of the optimiser, must be above 0"),
        ({"optim": "lbfgs"}, "optim of a method, must be one of 'adam', 'sgd'"),
        (
            {"statistics_momentum": 1.5},
            "statistics_momentum of delta, must be from 0 to 1, got 1.5",
        ),
        ({"class_momentum": float("nan")}, "class_momentum of delta, must be from 0 to 1"),
        ({"freeze": ["layer44"]}, "Did you mean 'layer4'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        DELTA(make_net("resnet_bn"), **settings)


def test_a_model_without_norm_layers():
    with pytest.raises(ModelError, match="normalisation layers"):
        DELTA(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)))
