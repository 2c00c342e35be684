"""The image corruptions of CIFAR-C, Tiny-ImageNet-C and ImageNet-C, severity 1 to 5.

Hendrycks and Dietterich, "Benchmarking neural network robustness to common corruptions and
perturbations", ICLR 2019, https://arxiv.org/abs/1903.12261

Written anew from the published constants. Every image has its own random generator, made from
(corruption, severity, seed, its index): a result does not depend on the images around it.
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

ALGORITHM = 1  # raise it whenever a change below changes a pixel
_CHUNK = 500_000  # values worked on at once: bounds memory, decides no pixel
_AT_LEAST = {"glass_blur": 16, "frost": 16}  # images: their work is per chunk, not per image
_READ = 512  # images read at once, by several threads where they are files

Rngs = Sequence[Generator]
corruptions: Registry[Callable[..., Bytes]] = Registry("corruption", "twoshift.data")


def corrupt(
    images: Images, name: str, severity: int, seed: int = 0, frost_root: Path | None = None
) -> Bytes:
    """Corrupt images; the same arguments give the same pixels.

    Args:
        images: uint8, (N, H, W, C) with one or three channels.
        name: A registered corruption.
        severity: 1 to 5.
        seed: Of the random corruptions.
        frost_root: The data folder with the overlays of ``frost``; by default `data_root`.
    """
    parts_of_it = corrupt_in_parts(images, name, severity, seed, frost_root)
    out = np.empty(images.shape, dtype=np.uint8)
    start = 0
    for part in parts_of_it:
        out[start : start + len(part)] = part
        start += len(part)
    return out


def corrupt_in_parts(
    images: Images, name: str, severity: int, seed: int = 0, frost_root: Path | None = None
) -> Iterator[Bytes]:
    """As `corrupt`, a few images at a time; wrong arguments are told at once."""
    apply = corruptions[name]
    _check(images, seed)
    c = constants(name, max(images.shape[1:3]), severity)
    if name == "frost":
        apply = partial(apply, overlays=load_overlays(data_root(frost_root)))
    key = [zlib.crc32(name.encode()), severity, seed]
    chunk = max(_AT_LEAST.get(name, 1), _CHUNK // math.prod(images.shape[1:]))

    def parts_of(first: int) -> Iterator[Bytes]:
        read = np.asarray(images[first : first + _READ])
        for start in range(0, len(read), chunk):
            part = read[start : start + chunk]
            numbers = range(first + start, first + start + len(part))
            yield apply(part, c, [np.random.default_rng([*key, i]) for i in numbers])

    return (part for first in range(0, len(images), _READ) for part in parts_of(first))


def style(side: int) -> str:
    """The benchmark whose constants images with that longer side get."""
    return {32: "CIFAR-C", 64: "Tiny-ImageNet-C", 224: "ImageNet-C"}[_table(side)]


def constants(name: str, side: int, severity: int) -> Any:
    """The published strength of a corruption for images with that longer side."""
    whole = isinstance(severity, int | np.integer) and not isinstance(severity, bool)
    if not whole or not 1 <= severity <= 5:
        raise SettingError("severity", must_be="1, 2, 3, 4 or 5", got=repr(severity))
    return _constants()[name][_table(side)][severity - 1]


def _table(side: int) -> int:
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
        raise BatchError(
            "images to corrupt", must_be="(N, H, W, 1 or 3), 8 pixels or more a side", got=shape
        )
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
    """Poisson noise of counted photons."""
    light = _unit(images) * c
    return _bytes(np.stack([r.poisson(x) for r, x in zip(rngs, light, strict=True)]) / c)


@corruptions.register("impulse_noise")
def impulse_noise(images: Bytes, c: float, rngs: Rngs) -> Bytes:
    """Salt and pepper: some values turn black or white."""
    lot = _each(rngs, lambda r: r.random(images.shape[1:]))
    return np.select([lot < c / 2, lot < c], [np.uint8(0), np.uint8(255)], images)


@corruptions.register("defocus_blur")
def defocus_blur(images: Bytes, c: tuple[float, float], rngs: Rngs) -> Bytes:
    """Blur by a disk, as out of focus."""
    return _bytes(parts.correlate(_unit(images), parts.disk(*c)))


@corruptions.register("glass_blur")
def glass_blur(images: Bytes, c: tuple[float, int, int], rngs: Rngs) -> Bytes:
    """Pixels wander locally between two blurs, as behind frosted glass."""
    sigma, delta, rounds = c
    height, width = images.shape[1:3]
    size = (rounds, height - 2 * delta, width - 2 * delta, 2)
    offsets = np.stack([r.integers(-delta, delta, size=size) for r in rngs], axis=-1)
    blurred = _bytes(parts.gaussian(_unit(images), sigma))
    return _bytes(parts.gaussian(_unit(parts.shuffle_locally(blurred, offsets)), sigma))


@corruptions.register("motion_blur")
def motion_blur(images: Bytes, c: tuple[float, float], rngs: Rngs) -> Bytes:
    """Blur along a line, as of a moving camera."""
    angles = _each(rngs, lambda r: r.uniform(-45, 45))
    # rounded: the benchmark takes this one from an image file
    return np.rint(parts.motion_blur(images.astype(np.float64), *c, angles)).astype(np.uint8)


@corruptions.register("zoom_blur")
def zoom_blur(images: Bytes, c: tuple[float, float, float], rngs: Rngs) -> Bytes:
    """Mean of growing zooms, as of a camera that moves closer."""
    factors = np.arange(*c)
    x = np.ascontiguousarray(_unit(images).transpose(1, 2, 0, 3))
    total = x.copy()
    for factor in factors:
        total += parts.clipped_zoom(x, factor)
    return _bytes(total.transpose(2, 0, 1, 3) / (len(factors) + 1))


@corruptions.register("snow")
def snow(images: Bytes, c: tuple[float, ...], rngs: Rngs) -> Bytes:
    """Falling flakes before a paler image."""
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
    keep, add, scale = c
    height, width, channels = images.shape[1:]
    ice = []
    for overlay in overlays[:5]:  # the benchmark never draws the sixth
        # larger than the table says where the image would not fit
        fit = max(scale, (height + 1) / overlay.shape[0], (width + 1) / overlay.shape[1])
        scaled = _resize(overlay.astype(np.float64), fit)
        ice.append(parts.gray(scaled) if channels == 1 else scaled)
    crops = []
    for rng in rngs:
        sheet = ice[rng.integers(5)]
        top = rng.integers(max(1, sheet.shape[0] - height))
        left = rng.integers(max(1, sheet.shape[1] - width))
        crops.append(sheet[top : top + height, left : left + width])
    return np.clip(keep * images + add * np.stack(crops), 0, 255).astype(np.uint8)


def _resize(x: Floats, scale: float) -> Floats:
    """Bilinear between the two nearest pixels, without smoothing first."""
    for axis in (0, 1):
        side = x.shape[axis]
        where = np.clip((np.arange(round(side * scale)) + 0.5) / scale - 0.5, 0, side - 1)
        low = np.minimum(where.astype(int), side - 2)
        share = (where - low).reshape((-1,) + (1,) * (x.ndim - 1 - axis))
        x = x.take(low, axis) * (1 - share) + x.take(low + 1, axis) * share
    return np.rint(x)


@corruptions.register("fog")
def fog(images: Bytes, c: tuple[float, float], rngs: Rngs) -> Bytes:
    """Clouds of a plasma map, the contrast lowered by them."""
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
    """Raise the value of HSV; hue and saturation stay."""
    x = _unit(images)
    value = x.max(-1, keepdims=True)
    raised = np.minimum(value + c, 1)
    ratio = np.divide(raised, value, out=np.zeros_like(value), where=value > 0)
    return _bytes(np.where(value > 0, x * ratio, raised))


@corruptions.register("contrast")
def contrast(images: Bytes, c: float, rngs: Rngs) -> Bytes:
    """Move every channel towards its mean over the image."""
    # a sum of whole numbers is exact in any order
    total = images.sum((1, 2), dtype=np.int64, keepdims=True)
    mean = total / (images.shape[1] * images.shape[2] * 255)
    return _bytes((_unit(images) - mean) * c + mean)


@corruptions.register("elastic_transform")
def elastic_transform(images: Bytes, c: tuple[float, float, float], rngs: Rngs) -> Bytes:
    """A random affine map, then smooth local displacements."""
    height, width = images.shape[1:3]
    side = max(height, width)
    if side > 128:
        side = side * 244 / 224  # the benchmark's constants for 224 pixels are times 244
    alpha, sigma, jitter = (side * value for value in c)
    moved = _each(rngs, lambda r: r.uniform(-jitter, jitter, size=(3, 2)))
    field = _each(rngs, lambda r: r.uniform(-1, 1, size=(height, width, 2)))
    field = parts.gaussian(field, sigma, mode="reflect", truncate=3) * alpha

    grid = np.moveaxis(np.indices((height, width), dtype=np.float64), 0, -1)
    centre, arm = np.array([height // 2, width // 2]), min(height, width) // 3
    points = centre + arm * np.array([[1, 1], [-1, 1], [-1, -1]])
    out = np.empty_like(images)
    for i, image in enumerate(_unit(images)):
        # three points and where they go determine the map; sampling needs its inverse
        homogeneous = np.column_stack([points + moved[i], np.ones(3)])
        inverse = np.linalg.solve(homogeneous, points)
        before = grid @ inverse[:2] + inverse[2]
        warped = _sample(image, before, "mirror")
        out[i] = _bytes(_sample(warped, grid + field[i], "reflect"))
    return out


def _sample(image: Floats, where: Floats, border: str) -> Floats:
    """Bilinear values of (H, W, C) at the rows and columns ``where`` (H, W, 2)."""
    at = np.moveaxis(where, -1, 0)
    out = np.empty_like(image)
    for channel in range(image.shape[-1]):
        out[..., channel] = ndimage.map_coordinates(image[..., channel], at, order=1, mode=border)
    return out


@corruptions.register("pixelate")
def pixelate(images: Bytes, c: float, rngs: Rngs) -> Bytes:
    """Fewer, larger pixels."""
    height, width = images.shape[1:3]
    small = (int(width * c), int(height * c))
    box = Image.Resampling.BOX
    return _pil(images, lambda x: x.resize(small, box).resize((width, height), box))


@corruptions.register("jpeg_compression")
def jpeg_compression(images: Bytes, c: int, rngs: Rngs) -> Bytes:
    """What JPEG leaves of an image."""

    def squeeze(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=c)
        return Image.open(file)

    return _pil(images, squeeze)


def _pil(images: Bytes, change: Callable[[Image.Image], Image.Image]) -> Bytes:
    pixels = images[..., 0] if images.shape[-1] == 1 else images
    changed = np.stack([np.asarray(change(Image.fromarray(x))) for x in pixels])
    return changed.reshape(images.shape)


@corruptions.register("speckle_noise")
def speckle_noise(images: Bytes, c: float, rngs: Rngs) -> Bytes:
    """Normal noise in proportion to the light."""
    x = _unit(images)
    return _bytes(x + x * _each(rngs, lambda r: r.normal(scale=c, size=images.shape[1:])))


@corruptions.register("gaussian_blur")
def gaussian_blur(images: Bytes, c: float, rngs: Rngs) -> Bytes:
    """Blur by a Gaussian."""
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
    wet = parts.drops(_bytes(np.where(layer < threshold, 0, layer)))[..., None]
    return _bytes(x + strength * wet * _colour((175, 238, 238), images))


def _colour(rgb: tuple[int, int, int], images: Bytes) -> Floats:
    colour = np.array(rgb) / 255
    return parts.gray(colour[:, None].T) if images.shape[-1] == 1 else colour


@corruptions.register("saturate")
def saturate(images: Bytes, c: tuple[float, float], rngs: Rngs) -> Bytes:
    """Paler or stronger colours: change the saturation of HSV."""
    if images.shape[-1] == 1:
        raise BatchError("images for 'saturate'", must_be="of three channels", got="grayscale")
    x = _unit(images)
    value, lowest = x.max(-1, keepdims=True), x.min(-1, keepdims=True)
    has_colour = value > lowest
    saturation = np.divide(value - lowest, value, out=np.zeros_like(value), where=has_colour)
    wanted = np.clip(saturation * c[0] + c[1], 0, 1)
    ratio = np.divide(wanted, saturation, out=np.zeros_like(value), where=has_colour)
    red = np.concatenate([value, value * (1 - wanted), value * (1 - wanted)], axis=-1)
    # gray has hue 0, so what it gains in saturation is red
    return _bytes(np.where(has_colour, value - (value - x) * ratio, red))
