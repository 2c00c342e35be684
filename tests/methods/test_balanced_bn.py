"""Balanced BN against layers that move class by class, channel by channel."""

import pytest
import torch
from torch import nn

from tests.methods import slow
from tests.toys import CLASSES, make_batches, make_net
from twoshift.errors import BatchError, MismatchError, ModelError, SettingError
from twoshift.methods import BalancedBN, Source
from twoshift.models.balanced_norm import BalancedNorm, moving

SIZES = (6, 5, 8, 1, 7, 6, 3, 8, 4, 6)


@pytest.mark.parametrize(
    ("name", "settings", "used"),
    [
        ("resnet_bn", {}, (0.01, 0.0)),  # the defaults for 10 classes
        ("mlp", {"eta": 0.4, "gamma": 0.3}, (0.4, 0.3)),
        ("mlp", {"eta": 1.0, "gamma": 1.0}, (1.0, 1.0)),
    ],
    ids=["resnet", "shared", "all shared"],
)
def test_against_a_plain_loop(name, settings, used):
    live, net = BalancedBN(make_net(name).double(), **settings), make_net(name).double().eval()
    layers, most = slow.balance(net, CLASSES, *used), 0
    for x in make_batches(name, SIZES):
        with torch.no_grad():
            expected = net(x.double())
            labels = expected.argmax(1).tolist()
            for layer in layers.values():
                layer.labels = labels
            net(x.double())
            for layer in layers.values():
                layer.labels = None
        torch.testing.assert_close(live(x.double()), expected, rtol=1e-6, atol=1e-6)
        most = max(most, *map(labels.count, labels))
    slow.same_balance(live.model, layers)
    assert most > 1 / 0.4  # a class moved all the way to its mean


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5), (6, 4, 3, 3), (1, 4), (2, 4, 2, 2, 2)])
@pytest.mark.parametrize("classes", [1, 3])
def test_the_layer_by_value_and_gradient(shape, classes):
    g = torch.Generator().manual_seed(0)
    layer = BalancedNorm(4, gamma=0.2).double().eval()
    layer.running_mean.normal_(generator=g)
    layer.running_var.uniform_(0.5, 2, generator=g)
    layer.start(classes)
    reference = slow.BalancedNorm(layer, classes, 0.3, 0.2)
    labels = torch.randint(classes, shape[:1], generator=g)
    for learn in (False, True, True, False):
        x = torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()
        reference.labels = labels.tolist() if learn else None
        if learn:
            with moving([layer], labels, 0.3):
                got = layer(x)
        else:
            got = layer(x)
        wanted = reference(x)
        torch.testing.assert_close(got, wanted)
        seed = torch.randn(shape, generator=g, dtype=torch.float64)
        inputs = [x, layer.weight, layer.bias]
        ours = torch.autograd.grad(got, inputs, seed)
        for a, b in zip(ours, torch.autograd.grad(wanted, inputs, seed), strict=True):
            torch.testing.assert_close(a, b)


def test_a_layer_that_is_used_twice_has_a_gradient():
    layer = BalancedNorm(2).eval()
    layer.start(3)
    x = torch.rand(4, 2, requires_grad=True)
    with moving([layer], torch.tensor([0, 1, 1, 2]), 0.1):
        layer(layer(x)).sum().backward()
    assert x.grad.isfinite().all()


def test_it_is_the_source_model_until_the_first_batch_was_taken_in():
    net, (x, y) = make_net("resnet_bn"), make_batches("resnet_bn", (8, 8))
    live = BalancedBN(net, eta=0.1)
    assert torch.equal(live(x), Source(net)(x))
    assert not torch.allclose(live(y), Source(net)(y))


def test_a_frequent_class_counts_no_more_than_the_others():
    """However many images a class has, the mean moves by one class's part of their distance."""
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 4)).eval()
    net[2].weight.data.zero_()
    net[2].bias.data.copy_(torch.tensor([0.0, 1.0, 0.0, 0.0]))  # always class 1
    live = BalancedBN(net, eta=1.0, gamma=0.0)
    for _ in range(50):
        live(torch.full((64, 2), 3.0))
    layer = live.model[1]
    assert layer.class_mean[:, 0].tolist() == [0.0, 3.0, 0.0, 0.0]
    assert layer.class_var[:, 0].tolist() == pytest.approx([1.0, 0.0, 1.0, 1.0])
    assert layer.running_mean[0] == pytest.approx(0.75)
    # three variances of four; the means 0, 3, 0, 0 have the variance 2.25
    assert layer.running_var[0] == pytest.approx(0.75 + 2.25)


@pytest.mark.parametrize(
    ("classes", "eta", "gamma"),
    [
        (2, 0.01, 0.0),
        (10, 0.01, 0.0),
        (11, 0.01, 0.1),
        (100, 0.05, 0.1),
        (101, 0.0505, 0.5),
        (1000, 0.5, 0.5),
        (3000, 1.0, 0.5),
    ],
)
def test_settings_by_the_number_of_classes(classes, eta, gamma):
    live = BalancedBN(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2), nn.Linear(2, classes)))
    assert (live._eta, live.model[1].gamma) == (pytest.approx(eta), gamma)
    assert live.settings() == {"eta": None, "gamma": None}
    assert live(torch.rand(3, 2)).isfinite().all()


def test_no_class_gets_a_negative_variance():
    layer = BalancedNorm(1, gamma=0.9).eval()
    layer.start(2)
    layer.class_var.copy_(torch.tensor([[1.0], [0.01]]))
    with moving([layer], torch.tensor([0, 0]), 0.25):
        layer(torch.zeros(2, 1))  # class 0 loses half of its variance
    assert layer.class_var.flatten().tolist() == [pytest.approx(0.5), 0.0]


def test_no_parameter_moves_and_no_gradient_is_kept():
    net = make_net("resnet_bn")
    live = BalancedBN(net)
    for x in make_batches("resnet_bn"):
        assert not live(x).requires_grad
    for path, p in live.model.named_parameters():
        assert torch.equal(p, net.get_parameter(path))
    assert not any(layer.votes for layer in live._layers)


@pytest.mark.parametrize("name", ["resnet_bn", "mlp"])
def test_single_images(name):
    live = BalancedBN(make_net(name), eta=1.0)
    for x in make_batches(name, (1,) * 6):
        assert live(x).isfinite().all()


def test_statistics_that_overflow_are_refused():
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2), nn.Linear(2, 4)).eval()
    live = BalancedBN(net)
    before = live.state()
    with pytest.raises(BatchError, match="the statistics, must be finite"):
        live(torch.full((3, 2), 1e30))  # their squares have no number
    assert all(torch.equal(t, before[n]) for n, t in live.state().items())
    assert not any(layer.votes for layer in live._layers)


def test_a_state_with_a_negative_variance_is_refused():
    live = BalancedBN(make_net("mlp"))
    state = live.state()
    (name, *_) = [n for n in state if n.endswith("class_var")]
    state[name] = -state[name]
    with pytest.raises(MismatchError, match="class_var, must be at least 0"):
        live.load_state(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eta": 0}, "eta of balanced statistics, must be above 0, at most 1, got 0"),
        ({"eta": 1.5}, "eta of balanced statistics, must be above 0, at most 1"),
        ({"gamma": -0.1}, "gamma of balanced statistics, must be from 0 to 1"),
        ({"gamma": float("nan")}, "gamma of balanced statistics, must be from 0 to 1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        BalancedBN(make_net("mlp"), **settings)


def test_models_it_cannot_use():
    with pytest.raises(ModelError, match=r"normalisation layers of .* for Balanced BN, .* IABN"):
        BalancedBN(make_net("resnet_iabn"))
    with pytest.raises(ModelError, match="'1' for Balanced BN, must be with running stat"):
        BalancedBN(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4, track_running_stats=False)))
