"""What images look like, pixel by pixel, and the summaries of groups of them."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twoshift.methods._appearance import appearance, distance, new_images, pooled, summary


def by_hand(image):
    rows = [channel.flatten().tolist() for channel in (image if image.dim() > 1 else [image])]
    pixels = [p for row in rows for p in row]
    mean = sum(pixels) / len(pixels)
    contrast = math.sqrt(sum((p - mean) ** 2 for p in pixels) / len(pixels))
    steps = [abs(b - a) for row in rows for a, b in itertools.pairwise(row)]
    detail = sum(steps) / len(pixels)
    return [mean, math.log(max(contrast, 1e-3)), math.log(max(detail, 1e-3))]


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 6, 6), (2, 7)])
def test_brightness_contrast_and_detail(shape):
    x = torch.rand(4, *shape)
    np.testing.assert_allclose(appearance(x), [by_hand(image) for image in x], atol=1e-4)


def test_features_instead_of_images_and_single_pixels():
    x = torch.rand(4, 12)
    np.testing.assert_allclose(appearance(x), [by_hand(row) for row in x], atol=1e-4)
    assert np.isfinite(appearance(torch.zeros(2, 3, 1, 1))).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(0, 99))
def test_groups_add_up(sizes, seed):
    """The summary of a stream is that of its batches, in whatever sizes they came."""
    x = torch.rand(sum(sizes), 3, 4, 4, generator=torch.Generator().manual_seed(seed)).double()
    seen = appearance(x)
    whole, found = summary(seen, len(seen)), np.zeros((3, 3))
    for part in np.split(seen, np.cumsum(sizes)[:-1]):
        found = pooled(found, summary(part, len(part)))
    np.testing.assert_allclose(found, whole, rtol=1e-9, atol=1e-12)


def test_images_like_the_one_before_are_not_new():
    seen = np.array([[0.5, -1.0, -3.0]] * 4 + [[0.5, -1.02, -3.0], [0.9, -1.0, -3.0]])
    counted = [1, 0, 0, 0, 0.4, 1]
    assert new_images(seen, None) == pytest.approx(sum(counted), abs=1e-3)
    assert new_images(seen, seen[0]) == pytest.approx(sum(counted[1:]), abs=1e-3)
    parts = [new_images(seen[:3], None), new_images(seen[3:], seen[2])]
    assert sum(parts) == pytest.approx(sum(counted), abs=1e-3)  # whatever the batches
    assert new_images(seen[:1], seen[0]) == 0
    nothing = summary(seen[:1], 0.0)
    assert np.array_equal(pooled(np.zeros((3, 3)), nothing), nothing)
    assert new_images(seen[:1] + 1e-6, seen[0]) == 0  # added up in another order


def test_distance_is_in_standard_deviations_of_an_image():
    usual = np.array([[50.0] * 3, [0.5, -1.0, -3.0], [0.04, 0.25, 0.0]])
    recent = np.array([[32.0] * 3, [0.9, -1.5, -3.0], [9.0, 9.0, 9.0]])
    assert distance(usual, recent) == pytest.approx((0.4**2 / 0.04 + 0.5**2 / 0.25) / 3)
    recent[1, 2] = -2.9  # what never varied did
    assert distance(usual, recent) == pytest.approx((4 + 1 + 0.1**2 / 1e-4) / 3, rel=1e-4)
