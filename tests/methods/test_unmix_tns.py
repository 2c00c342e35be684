"""UnMix-TNS against loops over layers, images and components."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from tests.toys import CLASSES, make_batches, make_net, same
from twoshift.errors import BatchError, MismatchError, ModelError, SettingError
from twoshift.methods import Source, UnMixTNS
from twoshift.methods.unmix_tns import UnmixedNorm

SIZES = (6, 5, 2, 7, 1, 3, 6, 4, 1, 5)


class SlowNorm(nn.Module):
    """Image by image, component by component."""

    def __init__(self, layer, settings, generator):
        super().__init__()
        self.layer, self.temperature = layer, settings.get("near_temperature", 0.07)
        self.momentum_batch = settings.get("momentum_batch", 64)
        alpha, count = settings.get("alpha", 0.5), settings.get("components", 16)
        draws = torch.randn(count, layer.num_features, generator=generator).double()
        std, wide = layer.running_var.sqrt(), math.sqrt(alpha * count / (count - 1))
        self.means = [layer.running_mean + wide * std * draw for draw in draws]
        self.vars = [(1 - alpha) * layer.running_var for _ in draws]

    def forward(self, x):
        count, rows, images = len(self.means), [], []
        for image in x:
            mean = image.flatten(1).mean(1)
            var = ((image.flatten(1) - mean[:, None]) ** 2).mean(1)
            cosines = torch.stack([cosine_similarity(mean, m, dim=0) for m in self.means])
            near = (cosines / self.temperature).softmax(0)
            parts = zip(near, self.means, self.vars, strict=True)
            mixed = [((1 - p) * m + p * mean, (1 - p) * v + p * var) for p, m, v in parts]
            used = sum(m for m, _ in mixed) / count
            spread = sum(v + m**2 for m, v in mixed) / count - used**2
            scale = self.layer.weight / (spread + self.layer.eps).sqrt()
            rows.append((image - used[:, None, None]) * scale[:, None, None])
            images.append((near, mean, var))
        step = 1 - (1 - self.layer.momentum) ** (len(x) / self.momentum_batch)
        for k in range(count):
            to_mean = sum(near[k] * (mean - self.means[k]) for near, mean, _ in images)
            to_var = sum(near[k] * (var - self.vars[k]) for near, _, var in images)
            self.means[k] = self.means[k] + step * to_mean / len(x)
            self.vars[k] = self.vars[k] + step * to_var / len(x)
        return torch.stack(rows) + self.layer.bias[:, None, None]


def by_hand(net, **settings):
    net = copy.deepcopy(net).eval()
    generator = torch.Generator().manual_seed(settings.get("seed", 0))
    for module in list(net.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.BatchNorm2d):
                setattr(module, name, SlowNorm(layer, settings, generator))
    return net.requires_grad_(False)


def slow_norms(net):
    return {n: m for n, m in net.named_modules() if isinstance(m, SlowNorm)}


@pytest.mark.parametrize(
    "settings",
    [{}, {"components": 3, "alpha": 0.2, "near_temperature": 0.5, "momentum_batch": 4, "seed": 7}],
    ids=["defaults", "others"],
)
def test_against_loops_over_images_and_components(settings):
    net = make_net("resnet_bn").double()
    live, slow = UnMixTNS(net, **settings), by_hand(net, **settings)
    for x in make_batches("resnet_bn", SIZES):
        torch.testing.assert_close(live(x.double()), slow(x.double()), rtol=1e-6, atol=1e-6)
    for name, wanted in slow_norms(slow).items():
        layer = live.model.get_submodule(name)
        torch.testing.assert_close(layer.component_mean, torch.stack(wanted.means))
        torch.testing.assert_close(layer.component_var, torch.stack(wanted.vars))
        assert torch.equal(layer.running_mean, net.get_submodule(name).running_mean)


def test_in_single_precision_and_channels_last():
    net = make_net("resnet_bn")
    live, slow = UnMixTNS(net), by_hand(copy.deepcopy(net).double())
    for x in make_batches("resnet_bn", SIZES):
        logits = live(x.contiguous(memory_format=torch.channels_last))
        torch.testing.assert_close(logits, slow(x.double()).float(), rtol=1e-4, atol=1e-4)


def layer_of(channels=6, seed=0, **settings):
    """A layer on its own, ready to normalise."""
    g = torch.Generator().manual_seed(seed)
    layer = UnmixedNorm(channels).eval().requires_grad_(False)
    layer.running_mean.normal_(generator=g)
    layer.running_var.uniform_(0.5, 2, generator=g)
    layer.temperature, layer.momentum_batch = 0.07, 64.0
    layer.spread(settings.get("components", 16), settings.get("alpha", 0.5), g)
    return layer


def test_images_far_from_zero_lose_no_digits():
    layer = layer_of()
    layer.component_mean += 3000
    exact, x = copy.deepcopy(layer).double(), torch.randn(4, 6, 5, 5) + 3000
    torch.testing.assert_close(layer(x), exact(x.double()).float(), rtol=0, atol=5e-3)


@pytest.mark.parametrize("shape", [(2, 6, 4, 4), (2, 6, 7), (1, 6, 3, 2, 2), (2, 6, 1, 1)])
def test_equal_components_take_one_part_of_the_image(shape):
    """Without a spread at the start, each of the 16 components takes a 16th of it."""
    layer, x = layer_of(alpha=0.0), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    flat = x.flatten(2)
    mean = (15 * layer.running_mean + flat.mean(2)) / 16
    var = (15 * layer.running_var + flat.var(2, correction=0)) / 16
    expected = (flat - mean[..., None]) / (var[..., None] + layer.eps).sqrt()
    torch.testing.assert_close(layer(x).flatten(2), expected, rtol=1e-4, atol=1e-4)


def test_the_layout_of_the_input_stays():
    x = torch.randn(3, 6, 4, 5).contiguous(memory_format=torch.channels_last)
    assert layer_of()(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_components_in_single_precision(dtype):
    net, (x,) = make_net("resnet_bn"), make_batches("resnet_bn", (4,))
    live = UnMixTNS(copy.deepcopy(net).to(dtype))
    assert live.model.bn1.component_mean.dtype == torch.float32
    for _ in range(2):
        assert live(x.to(dtype)).isfinite().all()
    layer = layer_of()
    images = 300 * torch.randn(3, 6, 4, 4, generator=torch.Generator().manual_seed(1))
    got = copy.deepcopy(layer)(images.to(dtype))  # squares overflow float16
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), layer(images), rtol=0.05, atol=0.05)


def test_a_first_prediction_does_not_depend_on_the_rest_of_the_batch():
    net, (x,) = make_net("resnet_bn"), make_batches("resnet_bn", (6,))
    torch.testing.assert_close(UnMixTNS(net)(x)[2:3], UnMixTNS(net)(x[2:3]), rtol=1e-4, atol=1e-4)


def test_the_seed_decides_where_it_starts():
    net, (x,) = make_net("resnet_bn"), make_batches("resnet_bn", (6,))
    first, again, other = (UnMixTNS(net, seed=seed) for seed in (3, 3, 4))
    assert same(first.state(), again.state())
    assert torch.equal(first(x), again(x))
    assert not torch.allclose(first(x), other(x), atol=1e-3)
    first.reset()
    again.reset()
    assert same(first.state(), again.state())


def test_layers_without_weights_and_vectors():
    """BatchNorm1d keeps the running statistics."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.BatchNorm1d(16)
    )
    net.append(nn.Linear(16, CLASSES)).eval()
    live, x = UnMixTNS(net), torch.rand(6, 3, 2, 2)
    with torch.no_grad():
        hidden = copy.deepcopy(live.model[1])(net[0](x))
        expected = net[2:](hidden)
    torch.testing.assert_close(live(x), expected)
    assert not any("model.3" in name for name in live.state())
    assert not torch.allclose(expected, Source(net)(x), atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"components": 1}, "components of unmix_tns, must be a whole number from 2, got 1"),
        ({"components": 2.5}, "components of unmix_tns, must be a whole number from 2"),
        ({"alpha": 1.1}, "alpha of unmix_tns, must be from 0 to 1"),
        ({"near_temperature": 0}, "near_temperature of unmix_tns, must be above 0 and finite"),
        ({"momentum_batch": math.inf}, "momentum_batch of unmix_tns, must be above 0 and finite"),
        ({"seed": -1}, "seed of unmix_tns, must be a whole number from 0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        UnMixTNS(make_net("resnet_bn"), **settings)


@pytest.mark.parametrize("momentum", [None, 1.5])
def test_models_it_cannot_use(momentum):
    with pytest.raises(ModelError, match=r"normalisation layers of images in MLP .* BatchNorm1d"):
        UnMixTNS(make_net("mlp"))
    net = make_net("resnet_bn")
    net.layer2[0].bn1.momentum = momentum
    with pytest.raises(ModelError, match=r"'layer2.0.bn1' for unmix_tns, must be from 0 to 1"):
        UnMixTNS(net)


def test_statistics_that_overflow_are_refused():
    """Although the prediction is finite: infinite variances make it the bias, for ever."""
    live = UnMixTNS(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, CLASSES)).eval())
    before = live.state()
    with pytest.raises(BatchError, match="the statistics, must be finite"):
        live(torch.tensor([1e20, -1e20]).repeat(4, 3, 2, 1))
    assert same(live.state(), before)


def test_variances_below_zero_are_no_state():
    live = UnMixTNS(make_net("resnet_bn"))
    state = live.state()
    state["model.bn1.component_var"][0, 0] = -1
    with pytest.raises(MismatchError, match="component_var"):
        live.load_state(state)
