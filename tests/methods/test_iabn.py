"""The IABN method against a plain loop around slow IABN layers."""

import pytest
import torch
from torch import nn

from tests.methods import slow
from tests.models.test_norm import batch_moments, slow_iabn
from tests.toys import make_batches, make_net
from twoshift.errors import SettingError
from twoshift.methods import IABN
from twoshift.models.norm import InstanceAwareBatchNorm, batch_norms

SIZES = (4, 3, 4, 1, 2, 4, 3, 4, 2, 4)


class SlowIABN(nn.Module):
    """The layer by loops; statistics move where ``training`` says so."""

    def __init__(self, layer, momentum):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.mean, self.var = layer.running_mean.clone(), layer.running_var.clone()
        self.k, self.eps, self.momentum = layer.k, layer.eps, momentum

    def forward(self, x):
        mean, var = self.mean, self.var
        if self.training:
            mean, var = batch_moments(x)
            self.mean = (1 - self.momentum) * self.mean + self.momentum * mean.detach()
            self.var = (1 - self.momentum) * self.var + self.momentum * var.detach()
        return _differentiable(x, self, mean, var)


def _differentiable(x, layer, mean, var):
    """The same as ``slow_iabn``, in whole tensors so that torch can differentiate it."""
    n = x[0, 0].numel()
    own_mean = x.mean((2, 3))
    own_var = x.var((2, 3))
    by_mean = layer.k * ((var + layer.eps) / n) ** 0.5
    by_var = layer.k * (var + layer.eps) * (2 / (n - 1)) ** 0.5
    mean = mean + _shrink(own_mean - mean, by_mean)
    var = (var + _shrink(own_var - var, by_var)).clamp(min=0)
    shape = (*mean.shape, 1, 1)
    out = (x - mean.reshape(shape)) / (var.reshape(shape) + layer.eps) ** 0.5
    return out * layer.weight.view(-1, 1, 1) + layer.bias.view(-1, 1, 1)


def _shrink(d, width):
    return torch.where(d > width, d - width, torch.where(d < -width, d + width, 0.0))


def make_toy():
    """Two IABN layers in float64: references differ in the last bits, Adam would amplify them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            InstanceAwareBatchNorm(4, k=0.5),
            nn.ReLU(),
            nn.Conv2d(4, 5, 3, 2),
            InstanceAwareBatchNorm(5, k=0.5),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(5, 5),
        )
        for _, layer in batch_norms(net):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias)
            layer.running_mean.normal_(0, 0.3)
            layer.running_var.uniform_(0.3, 1.0)
    return net.double().eval()


def run_by_hand(net, batches, lr, momentum, optimizer=slow.Adam):
    """Predict in evaluation mode, then a pass in training mode for statistics and gradient."""
    for i in (1, 4):
        net[i] = SlowIABN(net[i], momentum)
    parameters = [p for i in (1, 4) for p in (net[i].weight, net[i].bias)]
    optimizer, logits = optimizer(parameters, lr), []
    for x in batches:
        with torch.no_grad():
            logits.append(net.eval()(x))
        slow.step(net.train(), x, parameters, optimizer)
    return logits


def test_the_reference_is_the_definition():
    layer = SlowIABN(make_toy()[1], 0.1)
    x = torch.randn(3, 4, 3, 3, generator=torch.Generator().manual_seed(0)).double()
    weight, bias = layer.weight.detach(), layer.bias.detach()
    expected = slow_iabn(x, weight, bias, *batch_moments(x), layer.k, layer.eps)
    torch.testing.assert_close(layer.train()(x).detach(), expected)


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        ({}, slow.Adam),
        ({"lr": 5e-3, "momentum": 0.2}, slow.Adam),
        ({"lr": 1e-2, "momentum": 0.0, "optim": "sgd"}, slow.SGD),
    ],
    ids=["default", "faster", "sgd"],
)
def test_against_a_plain_loop(settings, optimizer):
    batches = [x.double() for x in make_batches("toy", SIZES)]
    live, by_hand = IABN(make_toy(), **settings), make_toy()
    logits = [live(x) for x in batches]
    lr, momentum = settings.get("lr", 1e-4), settings.get("momentum", 0.01)
    for got, wanted in zip(
        logits, run_by_hand(by_hand, batches, lr, momentum, optimizer), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-7)
    for i in (1, 4):
        layer, reference = live.model[i], by_hand[i]
        torch.testing.assert_close(layer.weight, reference.weight, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(layer.bias, reference.bias, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(layer.running_mean, reference.mean)
        torch.testing.assert_close(layer.running_var, reference.var)
        assert not torch.equal(layer.weight, make_toy()[i].weight)


def test_statistics_and_norm_weights_move_nothing_else_does():
    net = make_net("resnet_iabn")
    live = IABN(net, freeze=["layer4"])
    for x in make_batches("resnet_iabn"):
        live(x)
    moves, source = slow.affine(live.model, ["layer4"]), dict(net.named_parameters())
    for path, parameter in live.model.named_parameters():
        assert torch.equal(parameter, source[path]) == (path not in moves), path
        assert (parameter.grad is None) == (path not in moves), path
    for path, layer in batch_norms(live.model):
        assert not layer.training
        assert not torch.equal(layer.running_mean, net.get_submodule(path).running_mean)
        assert layer.num_batches_tracked == 4


def test_the_prediction_does_not_depend_on_the_rest_of_the_batch():
    x = make_batches("resnet_iabn")[0]
    alone = IABN(make_net("resnet_iabn"))(x[:1])
    together = IABN(make_net("resnet_iabn"))(x)
    torch.testing.assert_close(alone[0], together[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 1.5}, "momentum of the statistics, must be from 0 to 1, got 1.5"),
        ({"momentum": -0.1}, "momentum of the statistics"),
        ({"momentum": float("nan")}, "momentum of the statistics"),
        ({"lr": 0}, "lr of the optimiser, must be above 0"),
        ({"freeze": ["layer44"]}, "Did you mean 'layer4'"),
        ({"optim": "adamw"}, "optim of a method, must be one of 'adam', 'sgd'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        IABN(make_net("resnet_iabn"), **settings)
