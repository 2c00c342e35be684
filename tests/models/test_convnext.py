"""The ConvNeXt against one written out, its size, its norm over channels, and its settings."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.toys import make_adapter
from twoshift import models
from twoshift.adapters import attach, condition
from twoshift.errors import SettingError
from twoshift.models.convnext import ChannelNorm
from twoshift.models.head import features, find_head
from twoshift.models.norm import NORMS, batch_norms
from twoshift.priors import longtail

NAME = "convnext_cifar"
SLIM = {"classes": 3, "width": 4, "blocks": 1, "kernel": 3}


def slim(seed=0, **settings):
    """A small network with nothing at its initial value."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        net = models.create(NAME, **{**SLIM, **settings}).eval()
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net


def images(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def slow_norm(x, weight, bias):
    """Every position of every image by itself."""
    out = torch.empty_like(x)
    for image in range(x.shape[0]):
        for i in range(x.shape[2]):
            for j in range(x.shape[3]):
                values = x[image, :, i, j]
                variance = ((values - values.mean()) ** 2).mean()
                out[image, :, i, j] = (values - values.mean()) / (variance + 1e-5).sqrt()
    return out * weight[:, None, None] + bias[:, None, None]


def random_norm(channels):
    norm, g = ChannelNorm(channels).requires_grad_(False), torch.Generator().manual_seed(1)
    norm.weight.copy_(torch.rand(channels, generator=g) + 0.5)
    norm.bias.copy_(torch.randn(channels, generator=g))
    return norm


@given(st.integers(1, 3), st.integers(2, 9), st.integers(1, 5), st.integers(1, 5))
def test_channels_are_normalised_at_every_position_by_itself(count, channels, rows, columns):
    norm, x = random_norm(channels), images(count, channels, rows, columns)
    expected = slow_norm(x, norm.weight, norm.bias)
    for layout in (torch.contiguous_format, torch.channels_last):
        got = norm(x.to(memory_format=layout))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_the_norm_copies_nothing_with_channels_last(monkeypatch):
    """Its views are contiguous: torch's kernel reads the images where they are."""
    norm, seen = random_norm(4), []
    real = F.layer_norm

    def spy(input, *arguments):
        seen.append(input)
        return real(input, *arguments)

    monkeypatch.setattr(F, "layer_norm", spy)
    x = images(2, 4, 5, 6).to(memory_format=torch.channels_last)
    out = norm(x)
    assert seen[0].is_contiguous()
    assert seen[0].data_ptr() == x.data_ptr()
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_methods_see_a_norm_layer():
    assert isinstance(ChannelNorm(3), NORMS)
    assert not list(batch_norms(slim()))


def slow_forward(net, blocks, kernel, x):
    """The network written out with functions, channels second everywhere."""
    state = net.state_dict()

    def read(path):
        return state[f"{path}.weight"], state[f"{path}.bias"]

    def pointwise(path, x):
        weight, bias = read(path)
        return F.conv2d(x, weight[:, :, None, None], bias)

    x = (x - net.normalize.mean) / net.normalize.std
    x = slow_norm(F.conv2d(x, *read("stem.0"), 2), *read("stem.1"))
    for stage in range(3):
        path, first = f"stages.{stage}", 0
        if stage:
            x = F.conv2d(slow_norm(x, *read(f"{path}.0")), *read(f"{path}.1"), 2)
            first = 2
        for block in range(first, first + blocks):
            at = f"{path}.{block}"
            h = F.conv2d(x, *read(f"{at}.dwconv"), 1, kernel // 2, groups=x.shape[1])
            h = pointwise(f"{at}.pwconv1", slow_norm(h, *read(f"{at}.norm")))
            x = x + pointwise(f"{at}.pwconv2", F.gelu(h))
    pooled = slow_norm(x.mean((2, 3), keepdim=True), *read("norm"))
    return pointwise("head", pooled)[:, :, 0, 0]


@pytest.mark.parametrize(
    ("blocks", "kernel", "shape"), [(1, 3, (16, 16)), (2, 5, (8, 12)), (1, 7, (29, 15))]
)
def test_forward_is_a_convnext_written_out(blocks, kernel, shape):
    net, x = slim(blocks=blocks, kernel=kernel), images(2, 3, *shape)
    with torch.no_grad():
        expected = slow_forward(net, blocks, kernel, x)
        assert expected.std() > 1e-2
        torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)


def test_size():
    count, w = sum(p.numel() for p in models.create(NAME).parameters()), 48
    stem = 13 * w + 2 * w
    blocks = sum(2 * (8 * c * c + (49 + 1 + 2 + 4 + 1) * c) for c in (w, 2 * w, 4 * w))
    halvings = sum(2 * c + 4 * c * 2 * c + 2 * c for c in (w, 2 * w))
    assert count == stem + blocks + halvings + 8 * w + (4 * w + 1) * 10 == 908_218


def test_a_seed_decides_the_weights_and_images_decide_the_logits():
    x = images(4, 3, 16, 16)
    with torch.no_grad():
        first, again, other = (slim(seed)(x) for seed in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        alone = torch.cat([slim()(image[None]) for image in x])
    torch.testing.assert_close(alone, first)  # no image feels the others


def test_memory_formats_give_the_same():
    last, x = slim().to(memory_format=torch.channels_last), images(2, 3, 16, 16)
    with torch.no_grad():
        expected = slim()(x)
        torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), expected)


def test_it_learns_everywhere():
    net = slim().to(memory_format=torch.channels_last).train()
    net(images(2, 3, 16, 16)).logsumexp(1).sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in net.parameters())


def test_the_stem_and_every_later_stage_halve_the_resolution():
    net, sizes = slim(), []
    for module in (net.stem, *net.stages):
        module.register_forward_hook(lambda _m, _i, out: sizes.append(tuple(out.shape[1:])))
    net(images(1, 3, 32, 32))
    assert sizes == [(4, 16, 16), (4, 16, 16), (8, 8, 8), (16, 4, 4)]


def test_images_are_normalised_inside_and_may_have_one_channel():
    grey = {"channels": 1, "mean": (0.1,), "std": (0.3,)}
    net, plain = slim(**grey), slim(**{**grey, "mean": (0.0,), "std": (1.0,)})
    x = images(2, 1, 28, 28)
    torch.testing.assert_close(net(x), plain((x - 0.1) / 0.3), rtol=1e-4, atol=1e-5)


def test_head_features_and_adapter():
    net, x = slim(classes=5), images(2, 3, 16, 16)
    assert find_head(net) == ("head", net.head)
    assert features(net, x).shape == (2, 16)
    adapted = attach(net, make_adapter(net))
    condition(adapted, longtail(5, 10))
    assert adapted(x).shape == (2, 5)
    assert not torch.allclose(adapted(x), net(x))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classes": 1}, "classes of the network, must be a whole number from 2, got 1"),
        ({"width": 1}, "width of the network, must be a whole number from 2, got 1"),
        ({"blocks": 0}, "blocks of the network, must be a whole number from 1, got 0"),
        ({"kernel": 4}, "kernel of the network, must be an odd number, got 4"),
        ({"std": (1.0, 0.0, 1.0)}, "std of the input, must be positive"),
        ({"norm": "bn"}, "has no setting 'norm'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        slim(**settings)
