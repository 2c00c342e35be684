import threading

import numpy as np
import pytest
import torch

from tests.train import toy
from twoshift.errors import DataCorrupt
from twoshift.train import reading


def pixels(count=30, side=16):
    return np.random.default_rng(2).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def test_tensors_are_the_parts_in_order_from_memory_and_files():
    frames = pixels()
    parts = [np.array([3, 1]), np.array([29]), np.arange(5, 12)]
    for images, expected in ((frames, frames), (toy.Framed(frames, 12), frames[:, 2:14, 2:14])):
        tensors = list(reading.tensors(images, parts))
        assert [len(x) for x in tensors] == [2, 1, 7]
        for x, part in zip(tensors, parts, strict=True):
            floats = torch.tensor(expected[part]).permute(0, 3, 1, 2) / 255
            torch.testing.assert_close(x, floats)


def test_augmentation_is_drawn_part_by_part():
    frames, parts = pixels(), [np.arange(8), np.arange(8, 30)]
    for images in (frames, toy.Framed(frames, 12)):
        tensor = torch.cat([*reading.tensors(images, parts, "crop", np.random.default_rng(4))])
        rng = np.random.default_rng(4)
        views = [reading.augmented(images, part, "crop", rng) for part in parts]
        torch.testing.assert_close(
            tensor, torch.tensor(np.concatenate(views)).permute(0, 3, 1, 2) / 255
        )


class Spoilt(toy.Framed):
    """The second part cannot be decoded."""

    def framed(self, rows):
        if 3 in rows:
            raise DataCorrupt("image 3 is truncated")
        return super().framed(rows)


def test_an_unreadable_image_is_reported_at_its_part():
    parts = [np.arange(2), np.arange(2, 4), np.arange(4, 6)]
    batches = reading.tensors(Spoilt(pixels(), 12), parts)
    assert len(next(batches)) == 2
    with pytest.raises(DataCorrupt, match="image 3"):
        next(batches)


def test_files_are_decoded_while_the_part_before_is_used():
    decoding = threading.Event()

    class Watched(toy.Framed):
        def framed(self, rows):
            if 1 in rows:
                decoding.set()
            return super().framed(rows)

    batches = reading.tensors(Watched(pixels(), 12), [np.array([0]), np.array([1])])
    next(batches)
    assert decoding.wait(10)  # nobody has asked for it yet
    batches.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch")]


@pytest.mark.parametrize(("side", "sizes"), [(12, [500, 500, 200]), (224, [64] * 18 + [48])])
def test_parts_are_smaller_for_larger_images(side, sizes):
    empty = np.broadcast_to(np.uint8(0), (1200, side, side, 3))
    parts = reading.in_parts(len(empty), empty)
    assert [len(part) for part in parts] == sizes
    assert np.concatenate(parts).tolist() == list(range(1200))


def test_a_part_has_at_least_one_image():
    huge = np.broadcast_to(np.uint8(0), (2, 5000, 5000, 3))
    assert [part.tolist() for part in reading.in_parts(2, huge)] == [[0], [1]]


@pytest.mark.parametrize("lazy", [False, True])
def test_pixel_statistics_equal_those_of_all_pixels_at_once(monkeypatch, lazy):
    monkeypatch.setattr(reading, "MAX_IMAGES", 7)
    frames = pixels() // np.array([1, 2, 5], np.uint8)
    images, decoded = (toy.Framed(frames, 12), frames[:, 2:14, 2:14]) if lazy else (frames, frames)
    mean, std = reading.pixel_statistics(images)
    values = decoded.reshape(-1, 3) / 255
    assert mean == pytest.approx(values.mean(0), abs=5.1e-5)
    assert std == pytest.approx(values.std(0), abs=5.1e-5)
    assert mean == [round(m, 4) for m in mean]
    if lazy:
        assert max(images.asked) == 7
