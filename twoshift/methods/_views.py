"""Random strong views of images: the augmentation that CoTTA and RoTTA share.

Wang et al., "Continual test-time domain adaptation", CVPR 2022, https://arxiv.org/abs/2203.13591.
Colour jitter in random order, rotation, shift and scale with the edge continued outwards, blur,
mirroring, noise. All but the noise is drawn once for the whole batch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from twoshift.errors import BatchError
from twoshift.methods._reservoir import in_layout_of

BRIGHTNESS, CONTRAST, SATURATION = (0.6, 1.4), (0.7, 1.3), (0.5, 1.5)
HUE, GAMMA = (-0.06, 0.06), (0.7, 1.3)
DEGREES, SCALE, SHIFT = (-15.0, 15.0), (0.9, 1.1), 1 / 16  # the shift is of the padded image
SIGMA, NOISE = (0.001, 0.5), 0.005
REACH = 2  # of the blur, in pixels
DRAWS = 11
LUMA = (0.2989, 0.587, 0.114)


def strong_view(x: Tensor, generator: torch.Generator) -> Tensor:
    """A random view of a batch of images (B, C, H, W) in [0, 1]; values outside are clipped.

    Saturation and hue change only images with three channels. The memory layout is that of ``x``.

    Args:
        x: The images.
        generator: The source of all randomness; a CPU generator.
    """
    check_images(x)
    order = torch.randperm(5, generator=generator).tolist()
    draws = torch.rand(DRAWS, generator=generator, dtype=torch.float64).tolist()
    noise = torch.randn(x.shape, generator=generator).mul_(NOISE)
    height, width = x.shape[2:]
    jitter = (brightness, contrast, saturation, hue, gamma)
    limits = (BRIGHTNESS, CONTRAST, SATURATION, HUE, GAMMA)
    view = x.clamp(0, 1)
    for i in order:
        view = jitter[i](view, _between(limits[i], draws[i]))
    view = affine(
        view,
        degrees=_between(DEGREES, draws[5]),
        shift=(_shift(width, draws[6]), _shift(height, draws[7])),
        scale=_between(SCALE, draws[8]),
        mirror=draws[10] < 0.5,  # mirroring and blurring commute
        margin=REACH,
    )
    view = blur(view, _between(SIGMA, draws[9]))
    # sampling returned channel by channel: convolutions would then be slower
    return in_layout_of(x, view.add_(noise.to(view)).clamp_(0, 1))


def check_images(x: Tensor) -> None:
    """Refuse a batch that is not images."""
    if x.dim() != 4:
        raise BatchError("a batch", must_be="images (B, C, H, W)", got=f"{tuple(x.shape)}")


def brightness(x: Tensor, factor: float) -> Tensor:
    """Multiply the pixels by ``factor``."""
    return (x * factor).clamp_(0, 1)


def contrast(x: Tensor, factor: float) -> Tensor:
    """Move the pixels away from, or towards, each image's mean grey."""
    mean = _grey(x).mean((1, 2, 3), keepdim=True)
    return torch.lerp(mean, x, factor).clamp_(0, 1)


def saturation(x: Tensor, factor: float) -> Tensor:
    """Move the pixels away from, or towards, their own grey."""
    if x.shape[1] != 3:
        return x
    return torch.lerp(_grey(x), x, factor).clamp_(0, 1)


def hue(x: Tensor, turn: float) -> Tensor:
    """Turn the colour wheel; 1 is a whole turn."""
    if x.shape[1] != 3:
        return x
    red, green, blue = x.unbind(1)
    low, high = x.aminmax(dim=1)
    chroma = high - low
    each = chroma.clamp(min=torch.finfo(x.dtype).tiny)  # grey has no hue: any value will do
    sixths = torch.where(
        high == red,
        (green - blue) / each,
        torch.where(high == green, (blue - red) / each + 2, (red - green) / each + 4),
    )
    sixths = (sixths + 6 * turn).remainder_(6)
    wheel = ((sixths - 3).abs_() - 1, 2 - (sixths - 2).abs_(), 2 - (sixths - 4).abs_())
    return torch.stack([part.clamp_(0, 1).mul_(chroma).add_(low) for part in wheel], 1)


def gamma(x: Tensor, power: float) -> Tensor:
    """Raise the pixels to a power."""
    return x.clamp(1e-8, 1).pow_(power)


def affine(
    x: Tensor,
    degrees: float,
    shift: tuple[float, float],
    scale: float,
    mirror: bool = False,
    margin: int = 0,
) -> Tensor:
    """Rotate and scale about the centre, shift, then mirror; bilinear, with the edge continued.

    Args:
        x: The images.
        degrees: Rotation, clockwise.
        shift: To the right and down, in pixels.
        scale: Above 1 enlarges.
        mirror: Whether to swap left and right at the end.
        margin: Pixels to show beyond each border.
    """
    batch, channels, height, width = x.shape
    to_right, down = (
        torch.arange(-margin, n + margin, dtype=x.dtype, device=x.device) - (n - 1) / 2
        for n in (width, height)
    )
    to_right = ((-to_right if mirror else to_right) - shift[0]).unsqueeze(0)
    down = (down - shift[1]).unsqueeze(1)
    cos, sin = (f(math.radians(degrees)) / scale for f in (math.cos, math.sin))
    # where each pixel comes from, with the borders at -1 and 1
    column = (cos * to_right + sin * down) * (2 / width)
    row = (cos * down - sin * to_right) * (2 / height)
    grid = torch.stack([column, row], -1)
    # all channels of all images as one image: the weights are the same
    flat = x.reshape(1, batch * channels, height, width)
    view = F.grid_sample(flat, grid.unsqueeze(0), padding_mode="border", align_corners=False)
    return view.reshape(batch, channels, *view.shape[2:])


def blur(x: Tensor, sigma: float) -> Tensor:
    """Gaussian blur with 5 x 5 pixels; takes a margin of two pixels and returns without it."""
    raw = [math.exp(-0.5 * (k / sigma) ** 2) for k in range(REACH + 1)]
    total = raw[0] + 2 * sum(raw[1:])
    for axis in (2, 3):
        n = x.shape[axis] - 2 * REACH
        blurred = x.narrow(axis, REACH, n) * (raw[0] / total)
        for k in range(1, REACH + 1):
            blurred.add_(x.narrow(axis, REACH - k, n), alpha=raw[k] / total)
            blurred.add_(x.narrow(axis, REACH + k, n), alpha=raw[k] / total)
        x = blurred
    return x


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    red, green, blue = x.split(1, 1)
    return (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])


def _between(limits: tuple[float, float], draw: float) -> float:
    return limits[0] + (limits[1] - limits[0]) * draw


def _shift(size: int, draw: float) -> float:
    """Whole pixels, up to a share of the image padded by half its size on both sides."""
    most = (size + 2 * (size // 2)) * SHIFT
    return float(round(_between((-most, most), draw)))
