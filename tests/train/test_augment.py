import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoshift.train.augment import augment


def images(count=7, height=9, width=11, channels=3):
    rng = np.random.default_rng(5)
    return rng.integers(1, 256, (count, height, width, channels), dtype=np.uint8)


def slow(batch, kind, seed):
    """One image and one pixel at a time, from the same draws."""
    rng = np.random.default_rng(seed)
    count, height, width, channels = batch.shape
    offsets = rng.integers(0, 9, (2, count))
    mirrored = rng.random(count) < 0.5 if kind == "crop_flip" else np.zeros(count, bool)
    result = np.zeros_like(batch)
    for n in range(count):
        cropped = np.zeros((height, width, channels), np.uint8)
        for r in range(height):
            for c in range(width):
                row, column = r + offsets[0, n] - 4, c + offsets[1, n] - 4
                if 0 <= row < height and 0 <= column < width:
                    cropped[r, c] = batch[n, row, column]
        result[n] = np.fliplr(cropped) if mirrored[n] else cropped
    return result


@given(
    st.sampled_from(["crop", "crop_flip"]),
    st.integers(1, 5),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([1, 3]),
    st.integers(0, 99),
)
def test_crops_and_mirror_images_equal_a_slow_reference(kind, count, height, width, channels, seed):
    batch = images(count, height, width, channels)
    found = augment(batch, kind, np.random.default_rng(seed))
    assert found.dtype == np.uint8
    assert found.shape == batch.shape
    np.testing.assert_array_equal(found, slow(batch, kind, seed))


def test_none_returns_the_same_images_and_draws_nothing():
    rng, batch = np.random.default_rng(0), images()
    before = rng.bit_generator.state
    assert augment(batch, "none", rng) is batch
    assert rng.bit_generator.state == before


@pytest.mark.parametrize("kind", ["crop", "crop_flip"])
def test_the_given_images_stay_as_they_were(kind):
    batch = images()
    augment(batch, kind, np.random.default_rng(0))
    np.testing.assert_array_equal(batch, images())


def test_every_offset_occurs_and_half_are_mirrored():
    marked = np.zeros((4000, 9, 9, 1), np.uint8)
    marked[:, 4, 4] = 200  # the centre, which no crop loses
    marked[:, 4, 5] = 100  # on its right, unless mirrored
    found = augment(marked, "crop_flip", np.random.default_rng(0))[..., 0]
    where = np.argwhere(found == 200)
    assert len(where) == 4000
    positions, counts = np.unique(where[:, 1:], axis=0, return_counts=True)
    assert len(positions) == 81
    assert counts.min() > 15  # 49 expected
    number, row, column = where[where[:, 2] > 0].T
    mirrored = (found[number, row, column - 1] == 100).mean()
    assert 0.45 < mirrored < 0.55
