"""ONDA against a loop that predicts one image at a time, around norm layers written by hand."""

import pytest
import torch
from torch import nn

from tests.toys import make_batches, make_net, same
from twoshift.errors import BatchError, ModelError, SettingError
from twoshift.methods.onda import ONDA
from twoshift.methods.source import Source
from twoshift.models.norm import batch_norms, replace_module

SIZES = (8, 5, 1, 7, 3, 12, 2, 6, 9, 4)


class SlowNorm(nn.Module):
    """BN or IABN by the definition, a sample at a time; training mode moves the statistics."""

    def __init__(self, layer, momentum):
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.mean, self.var = layer.running_mean.clone(), layer.running_var.clone()
        self.k, self.momentum = getattr(layer, "k", None), momentum

    def forward(self, x):
        mean, var = self.mean, self.var
        if self.training:
            values = [x[:, c].flatten() for c in range(x.shape[1])]
            count = len(values[0])
            mean = torch.stack([v.sum() / count for v in values])
            squares = torch.stack([((v - v.sum() / count) ** 2).sum() for v in values])
            unbiased = squares / (count - 1)
            self.mean = (1 - self.momentum) * self.mean + self.momentum * mean.detach()
            self.var = (1 - self.momentum) * self.var + self.momentum * unbiased.detach()
            var = squares / count if self.k is None else unbiased
        return torch.stack([self.normalised(row, mean, var) for row in x])

    def normalised(self, row, mean, var):
        n = row[0].numel()
        if self.k is not None:
            flat = row.reshape(len(row), n)
            own_mean = flat.sum(1) / n
            own_var = ((flat - own_mean[:, None]) ** 2).sum(1) / (n - 1)
            width = self.k * ((var + self.eps) / n) ** 0.5
            mean = mean + shrink(own_mean - mean, width)
            width = self.k * (var + self.eps) * (2 / (n - 1)) ** 0.5
            var = (var + shrink(own_var - var, width)).clamp(min=0)
        shape = (-1, *[1] * (row.dim() - 1))
        out = (row - mean.reshape(shape)) / (var.reshape(shape) + self.eps) ** 0.5
        return out * self.weight.reshape(shape) + self.bias.reshape(shape)


def shrink(d, width):
    return torch.where(d > width, d - width, torch.where(d < -width, d + width, 0.0))


def slowed(net, momentum):
    """The network with slow norm layers put in, and these by name."""
    slow = {path: SlowNorm(layer, momentum) for path, layer in batch_norms(net)}
    for path, layer in slow.items():
        replace_module(net, path, layer.eval())
    return net, slow


def doubles(name, sizes=SIZES):
    return [x.double() for x in make_batches(name, sizes)]


def run_by_hand(net, layers, batches, every):
    logits, waiting = [], []
    for x in torch.cat(batches):
        logits.append(net(x[None])[0])
        waiting.append(x)
        if len(waiting) == every:
            for layer in layers.values():
                layer.train()
            net(torch.stack(waiting))
            for layer in layers.values():
                layer.eval()
            waiting = []
    return torch.stack(logits), waiting


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("resnet_bn", {}),
        ("resnet_bn", {"update_every": 4, "momentum": 0.5}),
        ("resnet_iabn", {"update_every": 6}),
        ("mlp", {"update_every": 3, "momentum": 0.3}),
    ],
)
def test_against_a_plain_loop(name, settings):
    every, momentum = settings.get("update_every", 10), settings.get("momentum", 0.1)
    batches, (net, layers) = doubles(name), slowed(make_net(name).double(), momentum)
    live = ONDA(make_net(name).double(), **settings)
    logits = torch.cat([live(x) for x in batches])
    expected, waiting = run_by_hand(net, layers, batches, every)
    torch.testing.assert_close(logits, expected, rtol=1e-7, atol=1e-7)
    for path, layer in batch_norms(live.model):
        torch.testing.assert_close(layer.running_mean, layers[path].mean)
        torch.testing.assert_close(layer.running_var, layers[path].var)
        assert layer.num_batches_tracked == sum(SIZES) // every
    assert len(waiting) == sum(SIZES) % every
    kept = live.memory.get("waiting", torch.empty(0))
    assert torch.equal(kept, torch.stack(waiting) if waiting else torch.empty(0))


@pytest.mark.parametrize("name", ["resnet_bn", "resnet_iabn"])
def test_batches_do_not_matter(name):
    stream, runs = torch.cat(doubles(name)), []
    for size in (1, 7, 10, 16, len(stream)):
        live = ONDA(make_net(name).double())
        runs.append((torch.cat([live(x) for x in stream.split(size)]), live.state()))
    for logits, state in runs[1:]:
        torch.testing.assert_close(logits, runs[0][0])
        torch.testing.assert_close(state, runs[0][1])


def test_statistics_move_after_the_last_image_of_ten_and_not_before():
    net, (x,) = make_net("resnet_bn"), make_batches("resnet_bn", (22,))
    source, live = Source(net)(x), ONDA(net)
    before = {n: t for n, t in live.state().items() if "running" in n}
    torch.testing.assert_close(live(x[:9]), source[:9])
    assert same({n: live.state()[n] for n in before}, before)
    logits = live(x[9:])
    torch.testing.assert_close(logits[0], source[9])
    assert not torch.isclose(logits[1:], source[10:]).all(1).any()
    assert not any(torch.equal(live.state()[n], before[n]) for n in before)
    assert torch.equal(live.memory["waiting"], x[20:])


def test_nothing_moves_but_statistics():
    net = make_net("resnet_bn")
    live = ONDA(net, update_every=4)
    for x in make_batches("resnet_bn"):
        live(x)
        assert not any(m.training for m in live.model.modules())
    source = dict(net.named_parameters())
    for path, parameter in live.model.named_parameters():
        assert torch.equal(parameter, source[path])
        assert parameter.grad is None
    statistics = {f"model.{n}" for n, _ in net.named_buffers() if "normalize" not in n}
    assert live.moving().keys() == statistics


def test_at_momentum_zero_it_is_the_source_model():
    net = make_net("resnet_bn")
    live, source = ONDA(net, update_every=3, momentum=0.0), Source(net)
    for x in make_batches("resnet_bn"):
        torch.testing.assert_close(live(x), source(x))


def test_waiting_images_are_the_methods_own():
    x, y = make_batches("resnet_bn", (6, 6))
    live, other = ONDA(make_net("resnet_bn")), ONDA(make_net("resnet_bn"))
    live(x)
    other(x.clone())
    x.zero_()
    assert torch.equal(live(y), other(y))
    assert same(live.state(), other.state())


def test_saved_channels_last_it_goes_on_bit_for_bit(tmp_path):
    batches = [
        x.contiguous(memory_format=torch.channels_last)
        for x in make_batches("resnet_bn", (7, 8, 9))
    ]
    live = ONDA(make_net("resnet_bn"))
    live(batches[0])
    live.save(tmp_path / "s")
    restored = ONDA.load(tmp_path / "s", make_net("resnet_bn"))
    for x in batches[1:]:
        assert torch.equal(restored(x), live(x))
    assert same(restored.state(), live.state())


def test_reset_forgets_the_waiting_images():
    live, (x, y) = ONDA(make_net("resnet_bn")), make_batches("resnet_bn", (13, 9))
    first = live(y)
    live.reset()
    live(x)
    assert len(live.memory["waiting"]) == 3
    live.reset()
    assert not live.memory
    assert torch.equal(live(y), first)


def test_images_of_another_size_are_refused_while_some_wait():
    live, (x,) = ONDA(make_net("resnet_bn")), make_batches("resnet_bn", (5,))
    live(x)
    before = live.state()
    with pytest.raises(BatchError, match="like the images that the method remembers"):
        live(torch.rand(6, 3, 20, 20))
    assert same(live.state(), before)


def test_pixels_that_would_spoil_a_later_update_are_refused_at_once():
    live, (x, y) = ONDA(make_net("resnet_bn")), make_batches("resnet_bn", (5, 20))
    with pytest.raises(BatchError, match=r"pixels below 1e\+12, .* finite, got 1e\+20"):
        live(torch.full_like(x, -1e20))
    assert not live.memory
    assert live(y).isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"update_every": 1}, "update_every of onda, must be a whole number from 2, got 1"),
        ({"update_every": 2.5}, "update_every of onda, must be a whole number"),
        ({"momentum": 1.5}, "momentum of the statistics, must be from 0 to 1, got 1.5"),
        ({"momentum": float("nan")}, "momentum of the statistics"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        ONDA(make_net("resnet_bn"), **settings)


def test_models_without_batch_normalisation_are_refused():
    with pytest.raises(ModelError, match="batch normalisation layers"):
        ONDA(make_net("vit"))
