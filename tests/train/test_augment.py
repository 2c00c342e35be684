import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.train import toy
from twoshift.train import augment as augment_module
from twoshift.train.augment import augment, augmented


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
    views = augment(batch, kind, np.random.default_rng(seed))
    assert views.dtype == np.uint8
    assert views.shape == batch.shape
    np.testing.assert_array_equal(views, slow(batch, kind, seed))


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
    views = augment(marked, "crop_flip", np.random.default_rng(0))[..., 0]
    where = np.argwhere(views == 200)
    assert len(where) == 4000
    positions, counts = np.unique(where[:, 1:], axis=0, return_counts=True)
    assert len(positions) == 81
    assert counts.min() > 15  # 49 expected
    number, row, column = where[where[:, 2] > 0].T
    mirrored = (views[number, row, column - 1] == 100).mean()
    assert 0.45 < mirrored < 0.55


# -- images with a frame ----------------------------------------------------------------------


def framed(count=6, frame=16, size=12, channels=3):
    return toy.Framed(images(count, frame, frame, channels), size)


@pytest.mark.parametrize("kind", ["crop", "crop_flip"])
@pytest.mark.parametrize(("frame", "size"), [(16, 12), (9, 9), (11, 10)])
def test_crops_are_cut_out_of_the_frame(kind, frame, size):
    lazy, rows = framed(40, frame, size), np.arange(39, -1, -1)
    views = augmented(lazy, rows, kind, np.random.default_rng(3))
    assert views.shape == (40, size, size, 3)
    places, mirrored = set(), 0
    for view, row in zip(views, rows, strict=True):
        fits = [
            (top, left, flip)
            for top in range(frame - size + 1)
            for left in range(frame - size + 1)
            for flip in (False, True)
            if np.array_equal(
                np.fliplr(view) if flip else view,
                lazy.frames[row, top : top + size, left : left + size],
            )
        ]
        assert len(fits) == 1
        places.add(fits[0][:2])
        mirrored += fits[0][2]
    assert len(places) > (frame - size) ** 2  # 1, or most of 4 or 25
    assert (10 < mirrored < 30) if kind == "crop_flip" else mirrored == 0


def test_without_augmentation_files_are_as_at_test_time():
    lazy, rows = framed(), np.array([4, 1])
    views = augmented(lazy, rows, "none", np.random.default_rng(0))
    np.testing.assert_array_equal(views, lazy.frames[[4, 1], 2:14, 2:14])


def test_images_in_memory_are_padded_as_ever():
    batch, rows = images(), np.array([5, 0, 2])
    views = augmented(batch, rows, "crop_flip", np.random.default_rng(7))
    np.testing.assert_array_equal(views, slow(batch[rows], "crop_flip", 7))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("lazy", [True, False])
def test_resized_crops_equal_a_slow_reference(channels, lazy):
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (20, 8, 8, channels), dtype=np.uint8)
    frames = coarse.repeat(6, 1).repeat(6, 2)
    source = toy.Framed(frames, 30) if lazy else frames
    size = 30 if lazy else 48
    views = augmented(source, np.arange(20), "resized_crop_flip", np.random.default_rng(1))
    assert views.shape == (20, size, size, channels)
    draws = np.random.default_rng(1)
    for view, frame in zip(views, frames, strict=True):
        areas = [48 * 48 * a for a in draws.uniform(0.08, 1, 10)]
        stretches = [math.exp(math.log(4 / 3) * s) for s in draws.uniform(-1, 1, 10)]
        for area, stretch in zip(areas, stretches, strict=True):
            w, h = round(math.sqrt(area * stretch)), round(math.sqrt(area / stretch))
            if w <= 48 and h <= 48:
                break
        else:
            w = h = 48
        top, left = draws.integers(48 - h + 1), draws.integers(48 - w + 1)
        part = torch.tensor(frame[top : top + h, left : left + w]).permute(2, 0, 1)[None].float()
        expected = F.interpolate(part, (size, size), mode="bilinear", antialias=True)[0]
        expected = expected.flip(-1) if draws.random() < 0.5 else expected
        difference = np.abs(expected.permute(1, 2, 0).numpy() - view)
        assert difference.max() <= 2  # Pillow rounds after either direction


def test_windows_cover_the_areas_and_proportions_of_imagenet_training():
    rng = np.random.default_rng(0)
    windows = np.array([augment_module._window(256, 256, rng) for _ in range(4000)])
    top, left, height, width = windows.T
    assert (top >= 0).all()
    assert (top + height <= 256).all()
    assert (left + width <= 256).all()
    share, ratio = height * width / 256**2, width / height
    assert 0.075 < share.min() < 0.1
    assert share.max() > 0.95
    assert 0.45 < share.mean() < 0.54  # a little below 0.54: large ones fit less often
    assert 0.73 < ratio.min() < 0.77
    assert 1.31 < ratio.max() < 1.36
    assert abs(np.log(ratio).mean()) < 0.02


def test_where_no_window_fits_it_is_the_whole_image():
    class Large:
        def uniform(self, low, high, count):
            return np.full(count, high)

        def integers(self, high):
            return 0

    assert augment_module._window(20, 4, Large()) == (0, 0, 20, 4)
