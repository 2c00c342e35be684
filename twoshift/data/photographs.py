"""Generated images that are like photographs: where there are no real ones to try a network on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def photograph(
    rng: np.random.Generator, height: int, width: int, channels: int = 3
) -> NDArray[np.uint8]:
    """Random colours whose amplitude falls with frequency, as in photographs, (H, W, channels)."""
    down, right = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)
    frequency = np.hypot(down, right)
    frequency[0, 0] = 1
    x = np.stack([rng.normal(size=(height, width)) for _ in range(channels)])
    x += 2 * x.mean(0)  # the colours of a pixel are correlated
    x = np.fft.irfft2(np.fft.rfft2(x) / frequency, s=(height, width))
    return np.clip(120 + 55 * x / x.std(), 0, 255).astype(np.uint8).transpose(1, 2, 0)
