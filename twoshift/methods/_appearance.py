"""What images look like: whether one is new, and whether they suddenly look different.

What is known of a group of images is its *summary*, (3, 3): the number of new images in the first
row, then mean and variance of what each image looks like. Labels matter little for that, so a
change of the summary is a change of the images.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32.0  # new images that are compared with those before
KINDS = 3
FAINTEST = 1e-3  # contrast and detail below it look the same
NARROWEST = 1e-4  # variance of what images look like: identical ones differ from everything else
NEW = 0.05  # an image that looks so different from the one before is wholly new


def appearance(x: Tensor) -> Tensor:
    """Brightness, contrast and detail of every image, (B, 3).

    Brightness is the mean of the pixels, contrast the logarithm of their standard deviation, and
    detail that of the mean step from a pixel to the next.
    """
    pixels = x.detach().float()
    pixels = pixels.flatten(2) if x.dim() > 2 else pixels[:, None]
    each = pixels[0].numel()
    brightness = pixels.mean((1, 2))
    contrast = pixels.flatten(1).var(1, correction=0).sqrt()
    detail = pixels.diff(dim=2).abs().sum((1, 2)) / each
    logs = torch.stack([contrast, detail]).clamp_min(FAINTEST).log()
    return torch.cat([brightness[None], logs]).T


def new_images(seen: Tensor, last: Tensor | None) -> float:
    """How many of the images are new: one that looks like the image before it hardly counts.

    Args:
        seen: What the images look like, (B, 3).
        last: What the image before them looks like, (3,); None if there is none.
    """
    before = seen[:1] + NEW if last is None else last[None]
    steps = (seen - torch.cat([before, seen[:-1]])).abs().amax(1)
    return float((steps / NEW).clamp_(max=1).sum())


def summary(seen: Tensor, images: float) -> Tensor:
    """The summary of a batch.

    Args:
        seen: What the images look like, (B, 3).
        images: How many of them are new.
    """
    var, mean = torch.var_mean(seen, 0, correction=0)
    return torch.stack([torch.full_like(mean, images), mean, var])


def pooled(first: Tensor, second: Tensor) -> Tensor:
    """The summary of two groups together; of no images, it is that of the second."""
    images = first[0] + second[0]
    step = torch.where(images > 0, second[0] / images, 1.0)
    change = second[1] - first[1]
    var = first[2].lerp(second[2], step) + step * (1 - step) * change.square()
    return torch.stack([images, first[1] + step * change, var])


def distance(usual: Tensor, recent: Tensor) -> float:
    """How far the mean of the recent images is from that of the usual ones.

    A mean square over the kinds of appearance, each in standard deviations of a single image.
    """
    change = recent[1] - usual[1]
    return float((change.square() / usual[2].clamp_min(NARROWEST)).mean())
