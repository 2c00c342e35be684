"""The image corruptions of CIFAR-C, Tiny-ImageNet-C and ImageNet-C, severity 1 to 5.

Hendrycks and Dietterich, "Benchmarking neural network robustness to common corruptions and
perturbations", ICLR 2019, https://arxiv.org/abs/1903.12261

Reimplemented from the published constants. Every image has its own random generator, seeded with
(corruption, severity, seed, image index), so a result does not depend on the other images.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import numpy as np
import yaml
from numpy.random import Generator
from PIL import Image
from scipy import ndimage

from twoshift.data import _corruption_parts as parts
from twoshift.data._corruption_parts import Bytes, Floats
from twoshift.data._frost import load_overlays
from twoshift.data.base import Images, data_root
from twoshift.data.imagenet import Corruption
from twoshift.errors import BatchError, SettingError
from twoshift.registry import Registry

BENCHMARK: tuple[str, ...] = get_args(Corruption)
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")

ALGORITHM = 1  # increase it whenever a change below changes a pixel
_CHUNK = 500_000  # values processed at once: limits memory, does not affect the pixels
_MIN_CHUNK = {"glass_blur": 16, "frost": 16}  # images: most of their work is done once per chunk
_READ = 512  # images read at once; image files are decoded by several threads

Rngs = Sequence[Generator]
# a corruption takes images, its constants for one severity, and one generator per image
corruptions: Registry[Callable[..., Bytes]] = Registry("corruption", "twoshift.data")


def corrupt(
    images: Images, name: str, severity: int, seed: int = 0, frost_root: Path | None = None
) -> Bytes:
    """Corrupt images; the same arguments give the same pixels.

    Args:
        images: The clean images, uint8 (N, H, W, C) with one or three channels.
        name: Name of a registered corruption.
        severity: Severity, 1 to 5.
        seed: Seed of the random corruptions.
        frost_root: Data folder with the overlays of ``frost``; by default `data_root`.
    """
    return np.concatenate([*corrupt_in_parts(images, name, severity, seed, frost_root)])


def corrupt_in_parts(
    images: Images, name: str, severity: int, seed: int = 0, frost_root: Path | None = None
) -> Iterator[Bytes]:
    """Like `corrupt`, a few images at a time; wrong arguments raise an error right away."""
    apply = corruptions[name]
    _check(images, seed)
    c = constants(name, max(images.shape[1:3]), severity)
    if name == "frost":
        apply = partial(apply, overlays=load_overlays(data_root(frost_root)))
    key = [zlib.crc32(name.encode()), severity, seed]
    chunk = max(_MIN_CHUNK.get(name, 1), _CHUNK // math.prod(images.shape[1:]))

    def corrupt_block(first: int) -> Iterator[Bytes]:
        block = np.asarray(images[first : first + _READ])
        for start in range(0, len(block), chunk):
            part = block[start : start + chunk]
            indices = range(first + start, first + start + len(part))
            yield apply(part, c, [np.random.default_rng([*key, i]) for i in indices])

    return (part for first in range(0, len(images), _READ) for part in corrupt_block(first))


def style(side: int) -> str:
    """Name of the benchmark whose constants are used for images with that longer side."""
    return {32: "CIFAR-C", 64: "Tiny-ImageNet-C", 224: "ImageNet-C"}[_benchmark_side(side)]


def constants(name: str, side: int, severity: int) -> Any:
    """The published constants of a corruption for images with that longer side."""
    is_integer = isinstance(severity, int | np.integer) and not isinstance(severity, bool)
    if not is_integer or not 1 <= severity <= 5:
        raise SettingError("severity", must_be="1, 2, 3, 4 or 5", got=repr(severity))
    return _constants()[name][_benchmark_side(side)][severity - 1]


def _benchmark_side(side: int) -> int:
    return 32 if side <= 48 else 64 if side <= 128 else 224


@cache
def _constants() -> dict[str, dict[int, list[Any]]]:
    text = resources.files("twoshift.data").joinpath("corruption_constants.yaml").read_text()
    return yaml.safe_load(text)


def _check(images: Images, seed: int) -> None:
    shape, dtype = getattr(images, "shape", None), getattr(images, "dtype", None)
    if dtype != np.uint8:
        raise BatchError("images to corrupt", must_be="a uint8 array", got=dtype or type(images))
    if shape is None or len(shape) != 4 or shape[3] not in (1, 3) or min(shape[1:3]) < 8:
        must_be = "(N, H, W, 1 or 3), with sides of at least 8"
        raise BatchError("images to corrupt", must_be=must_be, got=shape)
    if len(images) == 0:
        raise BatchError("images to corrupt", must_be="at least one", got="none")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise SettingError("seed", must_be="a whole number, 0 or more", got=repr(seed))


def _unit(images: Bytes) -> Floats:
    return images / 255.0


def _bytes(x: Floats) -> Bytes:
    # truncated, not rounded, as the benchmark does
    return (np.clip(x, 0, 1) * 255).astype(np.uint8)


def _each(rngs: Rngs, draw: Callable[[Generator], Any]) -> Any:
    return np.stack([draw(rng) for rng in rngs])


@corruptions.register("gaussian_noise")
def gaussian_noise(images: Bytes, c: float, rngs: Rngs) -> Bytes:
    """Additive normal noise, as in low light."""
    return _bytes(_unit(images) + _each(rngs, lambda r: r.normal(scale=c, size=images.shape[1:])))


@corruptions.register("shot_noise")
def shot_noise(images: Bytes, c: float, rngs: Rngs) -> Bytes:
    """Poisson noise, as of a counted number of photons."""
    light = _unit(images) * c
    return _bytes(np.stack([r.poisson(x) for r, x in zip(rngs, light, strict=True)]) / c)


@corruptions.register("impulse_noise")
def impulse_noise(images: Bytes, c: float, rngs: Rngs) -> Bytes:
    """Salt and pepper: some values turn black or white."""
    u = _each(rngs, lambda r: r.random(images.shape[1:]))
    return np.select([u < c / 2, u < c], [np.uint8(0), np.uint8(255)], images)


@corruptions.register("defocus_blur")
def defocus_blur(images: Bytes, c: tuple[float, float], rngs: Rngs) -> Bytes:
    """Blur with a disk, as if out of focus."""
    return _bytes(parts.correlate(_unit(images), parts.disk(*c)))


@corruptions.register("glass_blur")
def glass_blur(images: Bytes, c: tuple[float, int, int], rngs: Rngs) -> Bytes:
    """Local shuffling of pixels between two blurs, as behind frosted glass."""
    sigma, delta, rounds = c
    height, width = images.shape[1:3]
    size = (rounds, height - 2 * delta, width - 2 * delta, 2)
    offsets = np.stack([r.integers(-delta, delta, size=size) for r in rngs], axis=-1)
    blurred = _bytes(parts.gaussian(_unit(images), sigma))
    return _bytes(parts.gaussian(_unit(parts.shuffle_locally(blurred, offsets)), sigma))


@corruptions.register("motion_blur")
def motion_blur(images: Bytes, c: tuple[float, float], rngs: Rngs) -> Bytes:
    """Blur along a line, as from a moving camera."""
    angles = _each(rngs, lambda r: r.uniform(-45, 45))
    # rounded, not truncated: the benchmark reads this one from an image file
    return np.rint(parts.motion_blur(images.astype(np.float64), *c, angles)).astype(np.uint8)


@corruptions.register("zoom_blur")
def zoom_blur(images: Bytes, c: tuple[float, float, float], rngs: Rngs) -> Bytes:
    """Mean of growing zooms, as from a camera that moves closer."""
    factors = np.arange(*c)
    x = np.ascontiguousarray(_unit(images).transpose(1, 2, 0, 3))
    total = x.copy()
    for factor in factors:
        total += parts.clipped_zoom(x, factor)
    return _bytes(total.transpose(2, 0, 1, 3) / (len(factors) + 1))


@corruptions.register("snow")
def snow(images: Bytes, c: tuple[float, ...], rngs: Rngs) -> Bytes:
    """Falling flakes in front of a paler image."""
    mean, std, zoom, threshold, radius, sigma, mix = c
    layer = _each(rngs, lambda r: r.normal(mean, std, size=images.shape[1:3]))
    angles = _each(rngs, lambda r: r.uniform(-135, -45))
    layer = parts.clipped_zoom(layer.transpose(1, 2, 0), zoom).transpose(2, 0, 1)[..., None]
    flakes = _bytes(np.where(layer < threshold, 0, layer)).astype(np.float64)
    flakes = np.rint(parts.motion_blur(flakes, radius, sigma, angles)) / 255
    x = _unit(images)
    x = mix * x + (1 - mix) * np.maximum(x, parts.gray(x) * 1.5 + 0.5)
    return _bytes(x + flakes + flakes[:, ::-1, ::-1])


@corruptions.register("frost")
def frost(
    images: Bytes, c: tuple[float, float, float], rngs: Rngs, overlays: Sequence[Bytes]
) -> Bytes:
    """A photograph of frost laid over the image."""
    image_weight, ice_weight, scale = c
    height, width, channels = images.shape[1:]
    sheets = []
    for overlay in overlays[:5]:  # the benchmark never draws the sixth
        # larger than in the table if the image would not fit
        fit = max(scale, (height + 1) / overlay.shape[0], (width + 1) / overlay.shape[1])
        scaled = _resize(overlay.astype(np.float64), fit)
        sheets.append(parts.gray(scaled) if channels == 1 else scaled)
    crops = []
    for rng in rngs:
        sheet = sheets[rng.integers(5)]
        top = rng.integers(max(1, sheet.shape[0] - height))
        left = rng.integers(max(1, sheet.shape[1] - width))
        crops.append(sheet[top : top + height, left : left + width])
    return np.clip(image_weight * images + ice_weight * np.stack(crops), 0, 255).astype(np.uint8)


def _resize(x: Floats, scale: float) -> Floats:
    """Bilinear resize, without antialiasing."""
    for axis in (0, 1):
        side = x.shape[axis]
        positions = (np.arange(round(side * scale)) + 0.5) / scale - 0.5
        x = parts.interpolate(x, np.clip(positions, 0, side - 1), axis)
    return np.rint(x)


@corruptions.register("fog")
def fog(images: Bytes, c: tuple[float, float], rngs: Rngs) -> Bytes:
    """Clouds from a plasma map, which also lower the contrast."""
    strength, decay = c
    height, width = images.shape[1:3]
    side = 1 << (max(height, width) - 1).bit_length()
    cloud = parts.plasma(_each(rngs, lambda r: r.uniform(-1, 1, size=(side, side))), decay)
    x = _unit(images)
    highest = x.max((1, 2, 3), keepdims=True)
    x += strength * cloud[:, :height, :width, None]
    return _bytes(x * highest / (highest + strength))


@corruptions.register("brightness")
def brightness(images: Bytes, c: float, rngs: Rngs) -> Bytes:
    """Raise the value in HSV; hue and saturation stay the same."""
    x = _unit(images)
    value = x.max(-1, keepdims=True)
    raised = np.minimum(value + c, 1)
    ratio = np.divide(raised, value, out=np.zeros_like(value), where=value > 0)
    return _bytes(np.where(value > 0, x * ratio, raised))


@corruptions.register("contrast")
def contrast(images: Bytes, c: float, rngs: Rngs) -> Bytes:
    """Move every channel towards its mean over the image."""
    # a sum of integers is exact, whatever the order
    total = images.sum((1, 2), dtype=np.int64, keepdims=True)
    mean = total / (images.shape[1] * images.shape[2] * 255)
    return _bytes((_unit(images) - mean) * c + mean)


@corruptions.register("elastic_transform")
def elastic_transform(images: Bytes, c: tuple[float, float, float], rngs: Rngs) -> Bytes:
    """A random affine map, then smooth local displacements."""
    height, width = images.shape[1:3]
    side = max(height, width)
    if side > 128:
        side = side * 244 / 224  # the benchmark multiplies its constants for 224 pixels by 244
    alpha, sigma, jitter = (side * value for value in c)
    shifts = _each(rngs, lambda r: r.uniform(-jitter, jitter, size=(3, 2)))
    field = _each(rngs, lambda r: r.uniform(-1, 1, size=(height, width, 2)))
    field = parts.gaussian(field, sigma, mode="reflect", truncate=3) * alpha

    grid = np.moveaxis(np.indices((height, width), dtype=np.float64), 0, -1)
    centre, arm = np.array([height // 2, width // 2]), min(height, width) // 3
    points = centre + arm * np.array([[1, 1], [-1, 1], [-1, -1]])
    out = np.empty_like(images)
    for i, image in enumerate(_unit(images)):
        # three points and their images determine the affine map; sampling needs its inverse
        homogeneous = np.column_stack([points + shifts[i], np.ones(3)])
        inverse = np.linalg.solve(homogeneous, points)
        positions = grid @ inverse[:2] + inverse[2]
        warped = _sample(image, positions, "mirror")
        out[i] = _bytes(_sample(warped, grid + field[i], "reflect"))
    return out


def _sample(image: Floats, positions: Floats, border: str) -> Floats:
    """Bilinear samples of (H, W, C) at ``positions``: row and column, (H, W, 2)."""
    points = np.moveaxis(positions, -1, 0)
    channels = np.moveaxis(image, -1, 0)
    sampled = [ndimage.map_coordinates(x, points, order=1, mode=border) for x in channels]
    return np.stack(sampled, axis=-1)


@corruptions.register("pixelate")
def pixelate(images: Bytes, c: float, rngs: Rngs) -> Bytes:
    """Fewer, larger pixels."""
    height, width = images.shape[1:3]
    small = (int(width * c), int(height * c))
    box = Image.Resampling.BOX
    return _pil(images, lambda x: x.resize(small, box).resize((width, height), box))


@corruptions.register("jpeg_compression")
def jpeg_compression(images: Bytes, c: int, rngs: Rngs) -> Bytes:
    """Artefacts of JPEG compression."""

    def compress(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=c)
        return Image.open(file, formats=["JPEG"])

    return _pil(images, compress)


def _pil(images: Bytes, change: Callable[[Image.Image], Image.Image]) -> Bytes:
    pixels = images[..., 0] if images.shape[-1] == 1 else images
    out = np.stack([np.asarray(change(Image.fromarray(x))) for x in pixels])
    return out.reshape(images.shape)


@corruptions.register("speckle_noise")
def speckle_noise(images: Bytes, c: float, rngs: Rngs) -> Bytes:
    """Normal noise in proportion to the brightness."""
    x = _unit(images)
    return _bytes(x + x * _each(rngs, lambda r: r.normal(scale=c, size=images.shape[1:])))


@corruptions.register("gaussian_blur")
def gaussian_blur(images: Bytes, c: float, rngs: Rngs) -> Bytes:
    """Blur with a Gaussian."""
    return _bytes(parts.gaussian(_unit(images), c))


@corruptions.register("spatter")
def spatter(images: Bytes, c: tuple[float, ...], rngs: Rngs) -> Bytes:
    """Drops of water or specks of mud on the lens."""
    mean, std, sigma, threshold, strength, mud = c
    layer = _each(rngs, lambda r: r.normal(mean, std, size=images.shape[1:3]))
    layer = parts.gaussian(layer, sigma)
    x = _unit(images)
    if mud:
        cover = parts.gaussian((layer > threshold).astype(np.float64), strength)[..., None]
        cover = np.where(cover < 0.8, 0, cover)
        return _bytes(x * (1 - cover) + cover * _colour((63, 42, 20), images))
    water = parts.drops(_bytes(np.where(layer < threshold, 0, layer)))[..., None]
    return _bytes(x + strength * water * _colour((175, 238, 238), images))


def _colour(rgb: tuple[int, int, int], images: Bytes) -> Floats:
    colour = np.array(rgb) / 255
    return parts.gray(colour[:, None].T) if images.shape[-1] == 1 else colour


@corruptions.register("saturate")
def saturate(images: Bytes, c: tuple[float, float], rngs: Rngs) -> Bytes:
    """Paler or stronger colours: change the saturation in HSV."""
    if images.shape[-1] == 1:
        raise BatchError("images for 'saturate'", must_be="of three channels", got="grayscale")
    x = _unit(images)
    value, lowest = x.max(-1, keepdims=True), x.min(-1, keepdims=True)
    has_colour = value > lowest
    saturation = np.divide(value - lowest, value, out=np.zeros_like(value), where=has_colour)
    new = np.clip(saturation * c[0] + c[1], 0, 1)
    ratio = np.divide(new, saturation, out=np.zeros_like(value), where=has_colour)
    red = np.concatenate([value, value * (1 - new), value * (1 - new)], axis=-1)
    # gray has hue 0, so with more saturation it turns red
    return _bytes(np.where(has_colour, value - (value - x) * ratio, red))
