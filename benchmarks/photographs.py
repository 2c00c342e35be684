"""Generated images that are like photographs in what matters to speed."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from twoshift.data.corruptions import corrupt
from twoshift.data.stream import to_float

CORRUPTION, SEVERITY = "fog", 5


def photograph(rng: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """Random colours whose amplitude falls with frequency, as in photographs."""
    down, right = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)
    frequency = np.hypot(down, right)
    frequency[0, 0] = 1
    x = np.stack([rng.normal(size=(height, width)) for _ in range(3)])
    x += 2 * x.mean(0)  # the colours of a pixel are correlated
    x = np.fft.irfft2(np.fft.rfft2(x) / frequency, s=(height, width))
    return np.clip(120 + 55 * x / x.std(), 0, 255).astype(np.uint8).transpose(1, 2, 0)


@cache
def corrupted_batches(count: int, size: int, side: int) -> tuple[Tensor, ...]:
    """Corrupted photographs as a stream gives them: float32, channels last.

    Args:
        count: Number of batches.
        size: Images in each.
        side: Height and width.
    """
    rng = np.random.default_rng(1)
    images = np.stack([photograph(rng, side, side) for _ in range(count * size)])
    return to_float(corrupt(images, CORRUPTION, SEVERITY)).split(size)
