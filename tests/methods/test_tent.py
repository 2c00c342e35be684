"""TENT against a plain loop with optimisers written by hand."""

import pytest
import torch
from torch import nn

from tests.methods import slow
from tests.toys import NETS, make_adapter, make_batches, make_net
from twoshift.adapters import attach
from twoshift.errors import ModelError, SettingError
from twoshift.methods import Tent
from twoshift.methods._learning import entropy, norm_affine

SIZES = (8, 5, 8, 3, 8, 8, 6, 8, 2, 8, 7)
HAND = {"adam": slow.Adam, "sgd": slow.SGD}


def run_by_hand(net, batches, optim, lr, freeze=()):
    slow.batch_norms_in_training(net)
    parameters = list(slow.affine(net, freeze).values())
    optimizer = HAND[optim](parameters, lr)
    return [slow.step(net, x, parameters, optimizer) for x in batches]


@pytest.mark.parametrize("optim", ["adam", "sgd"])
@pytest.mark.parametrize("name", NETS)
def test_against_a_plain_loop(name, optim):
    lr = {"adam": 2e-3, "sgd": 2e-2}[optim]
    batches, by_hand = make_batches(name, SIZES), make_net(name)
    live = Tent(make_net(name), lr=lr, optim=optim)
    logits = [live(x) for x in batches]
    expected = run_by_hand(by_hand, batches, optim, lr)
    for got, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    moved = slow.affine(live.model)
    for path, wanted in slow.affine(by_hand).items():
        torch.testing.assert_close(moved[path], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NETS)
def test_only_norm_weights_move_and_only_they_have_gradients(name):
    net = make_net(name)
    live = Tent(net)
    for x in make_batches(name):
        live(x)
    moves, source = slow.affine(live.model), dict(net.named_parameters())
    for path, parameter in live.model.named_parameters():
        assert torch.equal(parameter, source[path]) == (path not in moves), path
        assert (parameter.grad is None) == (path not in moves), path
        assert parameter.requires_grad == (path in moves), path
    for path, buffer in net.named_buffers():
        assert torch.equal(live.model.get_buffer(path), buffer), path


@pytest.mark.parametrize(
    ("name", "freeze"),
    [("resnet_bn", ["layer4"]), ("resnet_bn", ["bn1", "layer2.0"]), ("vit", ["blocks.1", "norm"])],
)
def test_frozen_modules_stay(name, freeze):
    net, batches, by_hand = make_net(name), make_batches(name, SIZES), make_net(name)
    live = Tent(net, freeze=freeze)
    logits = [live(x) for x in batches]
    for got, wanted in zip(
        logits, run_by_hand(by_hand, batches, "adam", 1e-3, freeze), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    moves, everything = slow.affine(live.model, freeze), slow.affine(live.model)
    assert 0 < len(moves) < len(everything)
    for path, parameter in everything.items():
        assert torch.equal(parameter, slow.affine(net)[path]) == (path not in moves), path
        assert (parameter.grad is None) == (path not in moves), path
    assert live.settings()["freeze"] == freeze


def test_freezing_a_module_spares_others_whose_name_begins_alike():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.flat, self.norm, self.norm2 = nn.Flatten(), nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    net = Net()
    assert norm_affine(net, ["norm"]) == [net.norm2.weight, net.norm2.bias]


def test_entropy_goes_down():
    (x,) = make_batches("resnet_bn", (16,))
    live = Tent(make_net("resnet_bn"), lr=5e-3)
    values = [float(entropy(live(x)).mean()) for _ in range(15)]
    assert values[-1] < 0.8 * values[0]


@pytest.mark.parametrize(
    "logits", [[[0.0, 0.0, 0.0]], [[1.0, -2.0, 3.0], [50.0, 0.0, 0.0]], [[1e4, 0.0, -1e4]]]
)
def test_entropy(logits):
    rows = torch.tensor(logits, dtype=torch.float64)
    expected = torch.special.entr(rows.softmax(1)).sum(1)
    torch.testing.assert_close(entropy(rows), expected)


def test_the_adapters_own_norm_layers_are_left_alone():
    net = make_net("resnet_bn")
    adapter = make_adapter(net)
    adapter.feature_net = nn.Sequential(nn.Linear(1, 7), nn.LayerNorm(7), *adapter.feature_net[1:])
    live = Tent(attach(net, adapter))
    for x in make_batches("resnet_bn"):
        live(x)
    inside = live.model.fc.adapter.feature_net[1]
    assert torch.equal(inside.weight, torch.ones(7))
    assert torch.equal(inside.bias, torch.zeros(7))
    assert not inside.weight.requires_grad


def test_affine_free_norms_are_passed_over():
    net = nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(12, affine=False), nn.Linear(12, 4), nn.LayerNorm(4)
    )
    live = Tent(net)
    live(torch.rand(4, 3, 2, 2))
    assert len(live.optimizer.param_groups[0]["params"]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze": ["layer5"]}, "has no module 'layer5'. Did you mean 'layer"),
        ({"freeze": [""]}, "has no module ''"),
        ({"lr": 0}, "lr of the optimiser, must be above 0, got 0"),
        ({"lr": -1e-3}, "lr of the optimiser, must be above 0"),
        ({"lr": float("nan")}, "lr of the optimiser, must be above 0"),
        ({"optim": "lbfgs"}, "optim of a method, must be one of 'adam', 'sgd', got 'lbfgs'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        Tent(make_net("resnet_bn"), **settings)


def test_models_without_anything_to_move():
    plain = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    with pytest.raises(ModelError, match=r"normalisation layers with weights .* got none"):
        Tent(plain)
    with pytest.raises(ModelError, match="got none"):
        Tent(nn.Sequential(plain, nn.BatchNorm1d(4, affine=False)), freeze=[])
    with pytest.raises(ModelError, match="got all of them frozen"):
        Tent(make_net("mlp"), freeze=["body"])
