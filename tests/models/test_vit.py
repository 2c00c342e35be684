"""The vision transformer against one written out, its size, and the images that it takes."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.toys import make_adapter
from twoshift import models
from twoshift.adapters import attach, condition
from twoshift.errors import BatchError, SettingError
from twoshift.models.head import features, find_head
from twoshift.models.norm import batch_norms
from twoshift.models.vit import positions
from twoshift.priors import longtail

NAME = "vit_cifar"
SLIM = {"classes": 3, "width": 8, "blocks": 2, "heads": 2}
STEMS = ["patch", "conv"]


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


def slow_positions(rows, columns, width):
    """One number after the other."""
    quarter, table = width // 4, []
    for row in range(rows):
        for column in range(columns):
            token = []
            for place in (column, row):
                angles = [place / 10_000 ** (i / max(quarter - 1, 1)) for i in range(quarter)]
                token += [*map(math.sin, angles), *map(math.cos, angles)]
            table.append(token)
    return torch.tensor(table)


def norm(x, weight, bias):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * weight + bias


def slow_stem(state, stem, x):
    """Tokens in the order of a page, (B, tokens, width)."""
    if stem == "conv":
        x = F.conv2d(x, state["stem.0.weight"], None, 2, 1).movedim(1, -1)
        x = F.gelu(norm(x, state["stem.1.weight"], state["stem.1.bias"])).movedim(-1, 1)
        x = F.conv2d(x, state["stem.3.weight"], state["stem.3.bias"], 2, 1)
        return torch.stack([x[:, :, i, j] for i in range(x.shape[2]) for j in range(x.shape[3])], 1)
    rows, columns = (range(0, size, 4) for size in x.shape[2:])
    patches = [x[:, :, i : i + 4, j : j + 4].flatten(1) for i in rows for j in columns]
    return torch.stack(patches, 1) @ state["stem.weight"].flatten(1).T + state["stem.bias"]


def slow_forward(net, stem, heads, x):
    """The network written out, head by head and token by token."""
    state = net.state_dict()

    def read(path):
        return state[f"{path}.weight"], state[f"{path}.bias"]

    def linear(path, x):
        weight, bias = read(path)
        return x @ weight.T + bias

    rows, columns = (size // 4 for size in x.shape[2:])
    x = slow_stem(state, stem, (x - net.normalize.mean) / net.normalize.std)
    width = x.shape[-1]
    x = x + slow_positions(rows, columns, width)
    for i in range(len(net.blocks)):
        path, size, mixed = f"blocks.{i}", width // heads, []
        q, k, v = linear(f"{path}.attn.qkv", norm(x, *read(f"{path}.norm1"))).split(width, -1)
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            scores = torch.einsum("bid,bjd->bij", q[..., part], k[..., part]) / math.sqrt(size)
            mixed.append(torch.einsum("bij,bjd->bid", scores.softmax(-1), v[..., part]))
        x = x + linear(f"{path}.attn.proj", torch.cat(mixed, -1))
        inner = F.gelu(linear(f"{path}.mlp.0", norm(x, *read(f"{path}.norm2"))))
        x = x + linear(f"{path}.mlp.2", inner)
    return linear("head", norm(x, *read("norm")).mean(1))


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("shape", [(32, 32), (8, 12), (4, 4)])
def test_forward_is_a_transformer_written_out(stem, shape):
    net, x = slim(stem=stem), images(2, 3, *shape)
    with torch.no_grad():
        expected = slow_forward(net, stem, 2, x)
        assert expected.std() > 1e-2
        torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns", "width"), [(3, 5, 8), (8, 8, 96), (1, 1, 4)])
def test_positions_against_single_numbers(rows, columns, width):
    got = positions(rows, columns, width, torch.zeros(1))
    torch.testing.assert_close(got, slow_positions(rows, columns, width), rtol=1e-4, atol=1e-5)


def test_positions_tell_places_apart_in_any_precision():
    table = positions(8, 8, 16, torch.zeros(1, dtype=torch.float64))
    assert table.dtype == torch.float64
    distances = torch.cdist(table, table) + 9 * torch.eye(64)
    assert distances.min() > 0.1


def test_size():
    count = sum(p.numel() for p in models.create(NAME).parameters())
    stem, block = 128 * (3 * 16 + 1), 12 * 128**2 + 13 * 128
    assert count == stem + 5 * block + 2 * 128 + 129 * 10 == 999_178
    assert not list(batch_norms(models.create(NAME, **SLIM)))


def test_a_seed_decides_the_weights_and_images_decide_the_logits():
    x = images(4, 3, 16, 16)
    with torch.no_grad():
        first, again, other = (slim(seed)(x) for seed in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        alone = torch.cat([slim()(image[None]) for image in x])
    torch.testing.assert_close(alone, first)  # no image feels the others


@pytest.mark.parametrize("stem", STEMS)
def test_memory_formats_give_the_same(stem):
    net, x = slim(stem=stem), images(2, 3, 16, 16)
    last = slim(stem=stem).to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = net(x)
        torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), expected)


@pytest.mark.parametrize("stem", STEMS)
def test_it_learns_everywhere(stem):
    net = slim(stem=stem).train()
    net(images(2, 3, 16, 16)).logsumexp(1).sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in net.parameters())


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("shape", [(30, 32), (32, 29)])
def test_patches_must_divide_the_images(stem, shape):
    message = rf"images, must be multiples of 4, .*got \({shape[0]}, {shape[1]}\)"
    with pytest.raises(BatchError, match=message):
        slim(stem=stem)(images(1, 3, *shape))


def test_images_are_normalised_inside_and_may_have_one_channel():
    grey = {"channels": 1, "mean": (0.1,), "std": (0.3,)}
    net, plain = slim(**grey), slim(**{**grey, "mean": (0.0,), "std": (1.0,)})
    x = images(2, 1, 28, 28)
    torch.testing.assert_close(net(x), plain((x - 0.1) / 0.3))


def test_head_features_and_adapter():
    net, x = slim(classes=5), images(2, 3, 16, 16)
    assert find_head(net) == ("head", net.head)
    assert features(net, x).shape == (2, 8)
    adapted = attach(net, make_adapter(net))
    condition(adapted, longtail(5, 10))
    assert adapted(x).shape == (2, 5)
    assert not torch.allclose(adapted(x), net(x))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classes": 1}, "classes of the network, must be a whole number from 2, got 1"),
        ({"width": 10}, "width of the network, must be a multiple of 4 and of heads, 2, got 10"),
        ({"heads": 3}, "width of the network, must be a multiple of 4 and of heads, 3, got 8"),
        ({"heads": 0}, "heads of the network, must be a whole number from 1, got 0"),
        ({"blocks": 0}, "blocks of the network, must be a whole number from 1, got 0"),
        ({"stem": "cnv"}, "stem of the network, must be one of 'patch', 'conv', got 'cnv'. Did"),
        ({"mean": (0.5,)}, "mean and std of the input, must be 3 values each"),
        ({"norm": "bn"}, "has no setting 'norm'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        slim(**settings)
