"""Augmentation of training images, one whole batch at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from twoshift.data.base import Images, LazyImages, Rows

PADDING = 4
SCALE, STRETCH, TRIES = (0.08, 1.0), 4 / 3, 10  # of a resized crop, as usual for ImageNet

Pixels = NDArray[np.uint8]


def augmented(images: Images, rows: Rows, kind: str, rng: np.random.Generator) -> Pixels:
    """A random view of each of the images at ``rows``.

    Args:
        images: Images in memory, or in files that are decoded now.
        rows: Rows of ``images`` to read.
        kind: ``"crop_flip"``, ``"crop"``, ``"resized_crop_flip"`` or ``"none"``. Images in files
            are decoded to a frame, the centre of the image, and all crops are cut from it, even
            resized ones, which for ImageNet are usually cut from the whole image. Images in memory
            have no frame; they are padded, except for resized crops.
        rng: Random generator of the views.
    """
    if kind == "none":
        return images[rows]
    if not isinstance(images, LazyImages):
        return augment(images[rows], kind, rng)
    return _views(images.framed(rows), *images.shape[1:3], kind, rng)


def augment(images: Pixels, kind: str, rng: np.random.Generator) -> Pixels:
    """Random views of images without a frame.

    Args:
        images: Batch of images, (B, H, W, C).
        kind: Kind of the views, see `augmented`.
        rng: Random generator of the views.
    """
    if kind == "none":
        return images
    height, width = images.shape[1:3]
    padding = 0 if kind == "resized_crop_flip" else PADDING
    frames = np.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    return _views(frames, height, width, kind, rng)


def _views(frames: Pixels, height: int, width: int, kind: str, rng: np.random.Generator) -> Pixels:
    """Windows at random positions, half of them mirrored if ``kind`` says so, or resized crops."""
    if kind == "resized_crop_flip":
        return _resized_crops(frames, height, width, rng)
    count, margin = len(frames), frames.shape[1] - height  # the same in both directions
    top, left = rng.integers(0, margin + 1, (2, count))
    rows = top[:, None] + np.arange(height)
    columns = left[:, None] + np.arange(width)
    if kind == "crop_flip":
        mirrored = rng.random(count) < 0.5
        columns[mirrored] = columns[mirrored, ::-1]
    return frames[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


def _resized_crops(frames: Pixels, height: int, width: int, rng: np.random.Generator) -> Pixels:
    """Windows of random area and proportions, resized, half of them mirrored."""
    result = np.empty((len(frames), height, width, frames.shape[-1]), np.uint8)
    for frame, view in zip(frames, result, strict=True):
        top, left, rows, columns = _window(frame.shape[0], frame.shape[1], rng)
        part = frame[top : top + rows, left : left + columns]
        picture = Image.fromarray(part[..., 0] if part.shape[-1] == 1 else part)
        resized = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
        view[:] = resized.reshape(view.shape)[:, :: -1 if rng.random() < 0.5 else 1]
    return result


def _window(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random window; the whole image if ten tries do not fit."""
    areas = height * width * rng.uniform(*SCALE, TRIES)
    ratios = STRETCH ** rng.uniform(-1, 1, TRIES)
    rows = np.maximum(np.sqrt(areas / ratios).round().astype(int), 1)
    columns = np.maximum(np.sqrt(areas * ratios).round().astype(int), 1)
    fits = np.flatnonzero((rows <= height) & (columns <= width))
    if not len(fits):
        return 0, 0, height, width
    h, w = int(rows[fits[0]]), int(columns[fits[0]])
    return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
