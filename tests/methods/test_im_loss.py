"""The IM loss against a plain loop, for batch and for running statistics."""

import math

import pytest
import torch

from tests.methods import slow
from tests.toys import make_batches, make_net
from twoshift.errors import SettingError
from twoshift.methods.im_loss import IMLoss, information
from twoshift.models.norm import batch_norms

SIZES = (8, 5, 8, 3, 8, 2, 6, 8, 4, 8)
HAND = {"adam": slow.Adam, "sgd": slow.SGD}


def slow_loss(logits):
    """Mean entropy minus the entropy of the mean, one number at a time."""
    rows = [[e / sum(row.exp()) for e in row.exp()] for row in logits]
    entropies = [-sum(p * p.log() for p in row) for row in rows]
    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return sum(entropies) / len(rows) + sum(m * m.log() for m in mean)


def run_by_hand(net, batches, optim, lr, momentum, running):
    parameters = list(slow.affine(net).values())
    optimizer, outputs = HAND[optim](parameters, lr), []
    for _, layer in batch_norms(net):
        layer.momentum = momentum
    for x in batches:
        slow.batch_norms_in_training(net, not running)
        outputs.append(net(x).detach())
        slow.batch_norms_in_training(net, True)
        if not running:  # the second pass below is the first one again
            for _, layer in batch_norms(net):
                layer.track_running_stats = False
        optimizer.step(torch.autograd.grad(slow_loss(net(x)), parameters))
    return outputs


@pytest.mark.parametrize(
    ("name", "optim", "momentum"),
    [("resnet_bn", "adam", 0.01), ("resnet_iabn", "adam", 0.2), ("resnet_iabn", "sgd", 0.01)],
)
def test_against_a_plain_loop(name, optim, momentum):
    lr, running = {"adam": 2e-3, "sgd": 1e-2}[optim], name == "resnet_iabn"
    batches = [x.double() for x in make_batches(name, SIZES)]
    by_hand = make_net(name).double()
    live = IMLoss(make_net(name).double(), lr, optim, momentum=momentum)
    assert live.statistics == ("running" if running else "batch")
    logits = torch.cat([live(x) for x in batches])
    expected = torch.cat(run_by_hand(by_hand, batches, optim, lr, momentum, running))
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    moved = slow.affine(live.model)
    for path, wanted in slow.affine(by_hand).items():
        torch.testing.assert_close(moved[path], wanted, rtol=1e-6, atol=1e-6)
    if running:
        for path, layer in batch_norms(live.model):
            wanted = by_hand.get_submodule(path)
            torch.testing.assert_close(layer.running_mean, wanted.running_mean)
            torch.testing.assert_close(layer.running_var, wanted.running_var)


def test_information():
    sure = torch.eye(4) * 200
    assert information(sure).item() == pytest.approx(math.log(4))
    assert information(sure[:1].repeat(5, 1)).item() == pytest.approx(0, abs=1e-6)
    assert information(torch.zeros(3, 4)).item() == pytest.approx(0, abs=1e-6)
    extreme = torch.tensor([[1e4, 0.0, -1e4], [-1e4, 1e4, 0.0]], requires_grad=True)
    information(extreme).backward()
    assert extreme.grad.isfinite().all()


def test_a_batch_of_one_has_exactly_no_gradient():
    """Adam would make full steps of what rounding leaves."""
    net = make_net("resnet_bn")
    live = IMLoss(net)
    for x in make_batches("resnet_bn", (1, 1, 1)):
        live(x)
    for path, parameter in live.model.named_parameters():
        assert torch.equal(parameter, net.get_parameter(path)), path


def test_it_spreads_what_entropy_collapses():
    (x,) = make_batches("resnet_bn", (16,))
    live = IMLoss(make_net("resnet_bn"), lr=5e-3)
    values = [float(information(live(x))) for _ in range(15)]
    assert values[-1] > 1.2 * values[0]
    live.reset()
    assert not live.optimizer.state


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 1.5}, "momentum of the statistics"),
        ({"lr": 0}, "lr of the optimiser, must be above 0"),
        ({"optim": "adamw"}, "optim of a method, must be one of 'adam', 'sgd'"),
        ({"freeze": ["layer44"]}, "Did you mean 'layer4'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        IMLoss(make_net("resnet_bn"), **settings)
