"""What images look like: whether one is new, and whether they suddenly look different.

What is known of a group of images is its *summary*, (3, 3): the number of new images in the first
row, then mean and variance of what each image looks like. Labels matter little for that, so a
change of the summary is a change of the images. A dozen numbers: numpy is quicker than torch.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.linalg import vector_norm

Array = NDArray[np.float64]

BLOCK = 32.0  # new images that are compared with those before
KINDS = 3
FAINTEST = 1e-3  # contrast and detail below it look the same
NARROWEST = 1e-4  # variance of what images look like: identical ones differ from everything else
NEW = 0.05  # an image that looks so different from the one before is wholly new
BRIGHTEST = 1e6  # far beyond any picture: what overflows must not spread to later images
ROUNDING = 1e-5  # differences that come from the order in which pixels are added up


def appearance(x: Tensor) -> Array:
    """Brightness, contrast and detail of every image, (B, 3).

    Brightness is the mean of the pixels, contrast the logarithm of their standard deviation, and
    detail that of the mean step from a pixel to the next.
    """
    pixels = x.detach().float()
    pixels = pixels.flatten(2) if x.dim() > 2 else pixels[:, None]
    brightness, each = pixels.mean((1, 2)), pixels[0].numel()
    spread = vector_norm(pixels - brightness[:, None, None], dim=(1, 2))
    steps = vector_norm(pixels.diff(dim=2), 1, dim=(1, 2))
    seen = torch.stack([brightness, spread, steps], 1).cpu().numpy().astype(np.float64)
    seen /= 1.0, each**0.5, each
    seen = np.nan_to_num(seen, nan=BRIGHTEST).clip(-BRIGHTEST, BRIGHTEST)
    seen[:, 1:] = np.log(np.maximum(seen[:, 1:], FAINTEST))
    return seen


def new_images(seen: Array, last: Array | None) -> float:
    """How many of the images are new: one that looks like the image before it hardly counts.

    Args:
        seen: What the images look like, (B, 3).
        last: What the image before them looks like, (3,); None if there is none.
    """
    before = seen[:1] + 2 * NEW if last is None else last[None]
    steps = np.abs(seen - np.concatenate([before, seen[:-1]])).max(1) - ROUNDING
    return float(np.minimum(np.maximum(steps, 0) / NEW, 1).sum())


def summary(seen: Array, images: float) -> Array:
    """The summary of a batch.

    Args:
        seen: What the images look like, (B, 3).
        images: How many of them are new.
    """
    mean = seen.sum(0) / len(seen)
    return np.stack([np.full(KINDS, images), mean, np.square(seen - mean).sum(0) / len(seen)])


def pooled(first: Array, second: Array) -> Array:
    """The summary of two groups together; of no images, it is that of the second."""
    images = first[0, 0] + second[0, 0]
    step = second[0, 0] / images if images > 0 else 1.0
    change = second[1] - first[1]
    both = first + step * (second - first)
    both[0] = images
    both[2] += step * (1 - step) * np.square(change)
    return both


def distance(usual: Array, recent: Array) -> float:
    """How far the mean of the recent images is from that of the usual ones.

    A mean square over the kinds of appearance, each in standard deviations of a single image.
    """
    change = recent[1] - usual[1]
    return float((np.square(change) / np.maximum(usual[2], NARROWEST)).sum() / KINDS)
