"""Strong views: each operation, and the whole, against loops over pixels."""

import colorsys
import math

import pytest
import torch

from twoshift.errors import BatchError
from twoshift.methods import _views as views
from twoshift.methods._views import strong_view


def images(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def per_pixel(x, f):
    """Apply ``f`` to every (red, green, blue)."""
    out = x.clone()
    for i in range(len(x)):
        for r in range(x.shape[2]):
            for c in range(x.shape[3]):
                out[i, :, r, c] = torch.tensor(f(*x[i, :, r, c].tolist()))
    return out.clamp(0, 1)


def grey(r, g, b):
    return 0.2989 * r + 0.587 * g + 0.114 * b


def slow_brightness(x, f):
    return (f * x).clamp(0, 1)


def slow_contrast(x, f):
    out = x.clone()
    for i, image in enumerate(x):
        pixels = image.flatten(1).T.tolist()
        mean = sum(grey(*p) if len(p) == 3 else sum(p) / len(p) for p in pixels) / len(pixels)
        out[i] = f * image + (1 - f) * mean
    return out.clamp(0, 1)


def slow_saturation(x, f):
    return per_pixel(x, lambda *p: [f * v + (1 - f) * grey(*p) for v in p])


def slow_hue(x, turn):
    def turned(r, g, b):
        h, s, v = colorsys.rgb_to_hsv(r, g, b)
        return colorsys.hsv_to_rgb((h + turn) % 1, s, v)

    return per_pixel(x, turned)


def slow_gamma(x, power):
    return x.clamp(1e-8, 1) ** power


SLOW = {
    "brightness": slow_brightness,
    "contrast": slow_contrast,
    "saturation": slow_saturation,
    "hue": slow_hue,
    "gamma": slow_gamma,
}


def slow_affine(x, degrees, shift, scale):
    """Each pixel from where it was; outside is black."""
    height, width = x.shape[2:]
    angle, out = math.radians(degrees), torch.zeros_like(x)
    for r in range(height):
        for c in range(width):
            right, down = c - (width - 1) / 2 - shift[0], r - (height - 1) / 2 - shift[1]
            from_c = (math.cos(angle) * right + math.sin(angle) * down) / scale + (width - 1) / 2
            from_r = (-math.sin(angle) * right + math.cos(angle) * down) / scale + (height - 1) / 2
            out[:, :, r, c] = bilinear(x, from_r, from_c)
    return out


def bilinear(x, row, column):
    top, left = math.floor(row), math.floor(column)
    total = torch.zeros(x.shape[:2])
    for r, by_row in ((top, top + 1 - row), (top + 1, row - top)):
        for c, by_column in ((left, left + 1 - column), (left + 1, column - left)):
            if 0 <= r < x.shape[2] and 0 <= c < x.shape[3]:
                total += by_row * by_column * x[:, :, r, c]
    return total


def slow_blur(x, sigma):
    """5 x 5 pixels about each; nearest to the border are left out."""
    weights = {
        (r, c): math.exp(-0.5 * (r * r + c * c) / sigma**2)
        for r in range(-2, 3)
        for c in range(-2, 3)
    }
    height, width = x.shape[2] - 4, x.shape[3] - 4
    out = torch.zeros(*x.shape[:2], height, width)
    for (r, c), weight in weights.items():
        out += weight * x[:, :, 2 + r : 2 + r + height, 2 + c : 2 + c + width]
    return out / sum(weights.values())


def padded(x):
    """By half the size on all sides, the edge repeated."""
    rows, columns = x.shape[2] // 2, x.shape[3] // 2
    at = [
        torch.arange(-n, size + n).clamp(0, size - 1)
        for n, size in ((rows, x.shape[2]), (columns, x.shape[3]))
    ]
    return x[:, :, at[0]][:, :, :, at[1]]


def slow_view(x, draw):
    """The steps of the published augmentation one after the other."""
    order = torch.randperm(5, generator=draw).tolist()
    u = torch.rand(11, generator=draw, dtype=torch.float64).tolist()
    noise = 0.005 * torch.randn(x.shape, generator=draw)
    factors = [0.6 + 0.8 * u[0], 0.7 + 0.6 * u[1], 0.5 + u[2], 0.12 * u[3] - 0.06, 0.7 + 0.6 * u[4]]
    x = x.clamp(0, 1)
    for i in order:
        x = list(SLOW.values())[i](x, factors[i])
    height, width = x.shape[2:]
    x = padded(x)
    most = x.shape[3] / 16, x.shape[2] / 16
    shift = [round(m * (2 * draw - 1)) for m, draw in zip(most, u[6:8], strict=True)]
    x = slow_affine(x, 30 * u[5] - 15, shift, 0.9 + 0.2 * u[8])
    x = slow_blur(x, 0.001 + 0.499 * u[9])
    top, left = (x.shape[2] - height) // 2, (x.shape[3] - width) // 2
    x = x[:, :, top : top + height, left : left + width]
    if u[10] < 0.5:
        x = x.flip(3)
    return (x + noise).clamp(0, 1)


@pytest.mark.parametrize("seed", range(3))
def test_the_whole_view_is_the_published_one(seed):
    x = images(1, 3, 32, 32, seed=seed)
    expected = slow_view(x, generator(seed))
    torch.testing.assert_close(strong_view(x, generator(seed)), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("amount", ["least", "most"])
def test_colours_against_loops(name, amount):
    limits = getattr(views, name.upper())
    value = limits[0] if amount == "least" else limits[1]
    x = images(2, 3, 5, 4)
    x[0, :, 0] = torch.tensor([0.0, 1.0, 0.5])[:, None]  # black, white, grey and pure colours
    x[0, :, 1] = torch.eye(3, 4)
    x[1, :, 0] = 0.5
    got = getattr(views, name)(x, value)
    torch.testing.assert_close(got, SLOW[name](x, value), rtol=1e-5, atol=1e-5)
    assert not torch.equal(got, x)


@pytest.mark.parametrize("turn", [-0.9, -0.3, 0.25, 0.5, 1.0])
def test_hue_turns_all_the_way_round(turn):
    x = images(2, 3, 6, 6)
    torch.testing.assert_close(views.hue(x, turn), slow_hue(x, turn), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_hue_and_saturation_need_three_channels(channels):
    x = images(2, channels, 5, 5)
    assert views.hue(x, 0.05) is x
    assert views.saturation(x, 0.5) is x
    torch.testing.assert_close(views.contrast(x, 0.7), slow_contrast(x, 0.7))
    assert not torch.equal(strong_view(x, generator()), x)


@pytest.mark.parametrize("size", [(8, 8), (7, 9)])
@pytest.mark.parametrize(
    ("degrees", "shift", "scale"),
    [(0, (0, 0), 1), (90, (0, 0), 1), (-13, (1, -2), 0.9), (15, (0, 1), 1.1)],
)
def test_affine_against_explicit_sampling(size, degrees, shift, scale):
    x = images(2, 3, *size)
    wide = padded(padded(x))  # wide enough for the black outside never to be seen
    rows, columns = ((w - n) // 2 for w, n in zip(wide.shape[2:], size, strict=True))
    expected = slow_affine(wide, degrees, shift, scale)
    expected = expected[:, :, rows : rows + size[0], columns : columns + size[1]]
    got = views.affine(x, degrees, shift, scale)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    mirrored = views.affine(x, degrees, shift, scale, mirror=True)
    torch.testing.assert_close(mirrored, expected.flip(3), rtol=1e-5, atol=1e-5)
    margin = views.affine(x, degrees, shift, scale, margin=2)
    torch.testing.assert_close(margin[:, :, 2:-2, 2:-2], got)


@pytest.mark.parametrize("sigma", [0.001, 0.2, 0.5, 2.0])
def test_blur_against_an_explicit_kernel(sigma):
    x = images(2, 3, 9, 8)
    torch.testing.assert_close(views.blur(x, sigma), slow_blur(x, sigma), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 7), (3, 1, 8, 8), (2, 3, 16, 16)])
def test_views_keep_shape_and_range_and_leave_the_images_alone(shape):
    x = images(*shape) * 3 - 1
    before, draw = x.clone(), generator()
    for _ in range(10):
        view = strong_view(x, draw)
        assert view.shape == x.shape
        assert view.dtype == x.dtype
        assert view.min() >= 0
        assert view.max() <= 1
    assert torch.equal(x, before)


def test_the_generator_decides_everything():
    x = images(4, 3, 8, 8)
    first, again, other = (strong_view(x, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_one_draw_for_the_whole_batch():
    """But for the noise: equal images have equal views."""
    view = strong_view(images(1, 3, 16, 16).expand(4, -1, -1, -1), generator())
    assert (view - view[:1]).abs().max() < 0.05
    assert not torch.equal(view[0], view[1])


def test_layout_and_precision_do_not_matter():
    x = images(4, 3, 8, 8)
    expected = strong_view(x, generator())
    last = strong_view(x.contiguous(memory_format=torch.channels_last), generator())
    torch.testing.assert_close(last, expected)
    double = strong_view(x.double(), generator())
    torch.testing.assert_close(double.float(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_view_has_the_layout_of_the_images(layout):
    x = images(2, 3, 8, 8)
    view = strong_view(x.contiguous(memory_format=layout), generator())
    assert view.is_contiguous(memory_format=layout)
    # moving the pixels changes none of them
    torch.testing.assert_close(view, strong_view(x, generator()))


def test_vectors_have_no_views():
    with pytest.raises(BatchError, match=r"must be images \(B, C, H, W\), got \(4, 12\)"):
        strong_view(torch.rand(4, 12), generator())
