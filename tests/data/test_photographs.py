from __future__ import annotations

import numpy as np
import pytest

from twoshift.data.photographs import photograph


@pytest.mark.parametrize("channels", [1, 3])
def test_a_photograph_has_more_of_low_frequencies_and_repeats(channels):
    image = photograph(np.random.default_rng(0), 32, 48, channels)
    assert (image.shape, image.dtype) == ((32, 48, channels), np.uint8)
    assert np.array_equal(image, photograph(np.random.default_rng(0), 32, 48, channels))
    strength = np.abs(np.fft.fft(image[..., 0] - image[..., 0].mean(), axis=1)).mean(0)
    assert strength[1:4].mean() > 4 * strength[20:24].mean()


def test_colours_of_a_pixel_are_alike():
    pixels = photograph(np.random.default_rng(1), 64, 64).reshape(-1, 3)
    assert np.corrcoef(pixels.T)[0, 1] > 0.5
