"""Image operations that the corruptions use: blurs, zooms, the plasma map, drops of water.

All of them treat every image by itself, so its result does not depend on the others in its batch.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]


def gray(x: Floats) -> Floats:
    """Luma of (..., C) images, as (..., 1); images with one channel are returned as they are."""
    if x.shape[-1] == 1:
        return x
    red, green, blue = np.split(x, 3, axis=-1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def gaussian(x: Floats, sigma: float, mode: str = "nearest", truncate: float = 4.0) -> Floats:
    """Gaussian blur of (N, H, W, ...) over height and width."""
    return ndimage.gaussian_filter(x, sigma, mode=mode, truncate=truncate, axes=(1, 2))


def disk(radius: float, alias_blur: float) -> Floats:
    """A disk kernel that sums to 1, its rim smoothed by a small Gaussian."""
    reach, smooth = (8, 1) if radius <= 8 else (math.ceil(radius), 2)
    line = np.arange(-reach, reach + 1)
    flat = (line[:, None] ** 2 + line**2 <= radius**2).astype(np.float64)
    taps = np.exp(-(np.arange(-smooth, smooth + 1) ** 2) / (2 * alias_blur**2))
    taps /= taps.sum()
    flat /= flat.sum()
    for axis in (0, 1):
        flat = ndimage.correlate1d(flat, taps, axis=axis, mode="mirror")
    return flat


def correlate(x: Floats, kernel: Floats) -> Floats:
    """Correlate (N, H, W, C) with an odd square kernel; borders are reflected without the edge."""
    reach = len(kernel) // 2
    height, width = x.shape[1:3]
    padded = np.pad(x, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="reflect")
    out = np.zeros_like(x)
    for dy, dx in np.argwhere(kernel):  # most entries of a small disk are zero
        out += kernel[dy, dx] * padded[:, dy : dy + height, dx : dx + width]
    return out


def motion_blur(x: Floats, radius: float, sigma: float, angles: Floats) -> Floats:
    """Blur each of (N, H, W, C) along its angle with a one-sided Gaussian; edges are repeated."""
    steps = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights /= weights.sum()
    pad, (height, width) = len(steps), x.shape[1:3]
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="edge")
    out = np.zeros_like(x)
    for image, source, angle in zip(out, padded, np.deg2rad(angles), strict=True):
        tops = pad + np.ceil(steps * np.sin(angle) - 0.5).astype(int)
        lefts = pad + np.ceil(steps * np.cos(angle) - 0.5).astype(int)
        for weight, top, left in zip(weights, tops, lefts, strict=True):
            image += weight * source[top : top + height, left : left + width]
    return out


def clipped_zoom(x: Floats, factor: float) -> Floats:
    """Bilinear zoom into the centre of (H, W, ...) with aligned corners; the size stays."""
    for axis in (0, 1):
        side = x.shape[axis]
        crop = math.ceil(side / factor)
        zoomed = round(crop * factor)
        positions = (np.arange(side) + (zoomed - side) // 2) * (crop - 1) / (zoomed - 1)
        start = (side - crop) // 2
        centre = x[start : start + crop] if axis == 0 else x[:, start : start + crop]
        x = interpolate(centre, positions, axis)
    return x


def interpolate(x: Floats, positions: Floats, axis: int) -> Floats:
    """Values of ``x`` at fractional positions on an axis: linear between the two neighbours."""
    low = np.minimum(positions.astype(int), x.shape[axis] - 2)
    weight = (positions - low).reshape((-1,) + (1,) * (x.ndim - 1 - axis))
    return x.take(low, axis) * (1 - weight) + x.take(low + 1, axis) * weight


def shuffle_locally(x: Bytes, offsets: NDArray[np.int64]) -> Bytes:
    """Copy a neighbour's value to each inner pixel, one by one from the last to the first.

    The benchmark's script tries to swap the two pixels, but it swaps numpy views, which only copies
    one of them. This function copies, too.

    Args:
        x: The images, (N, H, W, C).
        offsets: Vertical and horizontal offsets of the neighbours, (rounds, H - 2d, W - 2d, 2, N)
            where d is the largest offset; the first belong to pixel H - d, the last to d + 1.
    """
    count, height, width = x.shape[:3]
    rounds, rows, columns = offsets.shape[:3]
    margin = (height - rows) // 2
    # index of the original pixel at every position; in a flat view, a copy is a single take
    source = np.repeat(np.arange(height * width)[:, None], count, axis=1)
    flat = source.reshape(-1)
    moves = (offsets[..., 0, :] * width + offsets[..., 1, :]) * count + np.arange(count)
    for turn in range(rounds):
        for i in range(rows):
            for j in range(columns):
                pixel = (height - margin - i) * width + width - margin - j
                source[pixel] = flat.take(moves[turn, i, j] + pixel * count)
    pixels = x.reshape(count, height * width, -1)
    return np.take_along_axis(pixels, source.T[..., None], axis=1).reshape(x.shape)


def plasma(noise: Floats, decay: float) -> Floats:
    """Fractal maps by the diamond-square algorithm, which wrap around and are scaled to 0..1.

    Args:
        noise: Uniform values in -1..1, (N, side, side), one per point; side is a power of two.
        decay: Divisor of the roughness from one grid to the next finer one.
    """
    side = noise.shape[-1]
    out = np.zeros_like(noise)
    step, wibble = side, 100.0
    while step >= 2:
        half = step // 2
        on, off = slice(None, None, step), slice(half, None, step)
        corner = out[:, on, on]
        pairs = corner + np.roll(corner, -1, 1)
        centre = (pairs + np.roll(pairs, -1, 2)) / 4 + wibble**2 * noise[:, off, off]
        out[:, off, off] = centre
        for rows, columns, along, across in ((on, off, 2, 1), (off, on, 1, 2)):
            ends = corner + np.roll(corner, -1, along)
            sides = centre + np.roll(centre, 1, across)
            out[:, rows, columns] = (ends + sides) / 4 + wibble**2 * noise[:, rows, columns]
        step, wibble = half, wibble / decay
    out -= out.min((1, 2), keepdims=True)
    return out / out.max((1, 2), keepdims=True)


def drops(layer: Bytes) -> Floats:
    """Brightness of a layer of drops with thickness (N, H, W), scaled so that the maximum is 1.

    Distances are exactly Euclidean; the benchmark uses a 5x5 chamfer approximation.
    """
    edges = _canny(layer.astype(np.float64))
    distance = np.full(layer.shape, 20.0)  # to the next edge, at most 20
    for i in np.flatnonzero(edges.any((1, 2))):
        distance[i] = np.minimum(ndimage.distance_transform_edt(~edges[i]), 20)
    depth = np.floor(_box(distance) + 1e-9)  # sums of equal values may be rounded down
    depth = np.stack([_equalise(d) for d in depth])
    relief = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], dtype=np.float64)
    lit = np.clip(correlate(depth[..., None], relief)[..., 0], 0, 255)
    out = layer * np.rint(_box(lit))
    highest = out.max((1, 2), keepdims=True)
    return np.divide(out, highest, out=np.zeros_like(out), where=highest > 0)


def _box(x: Floats) -> Floats:
    return correlate(x[..., None], np.ones((3, 3)))[..., 0] / 9


def _equalise(x: Floats) -> Floats:
    """Histogram equalisation to 0..255 of one image of small integers."""
    levels = x.astype(int)
    counts = np.bincount(levels.ravel())
    lowest = counts[levels.min()]
    if lowest == levels.size:
        return x
    return np.rint((np.cumsum(counts) - lowest) * (255 / (levels.size - lowest)))[levels]


def _canny(x: Floats, low: float = 50, high: float = 150) -> NDArray[np.bool_]:
    """Canny edges of (N, H, W): |dx| + |dy| of the Sobel filters, thinned, then hysteresis."""
    dx = ndimage.correlate1d(x, [-1, 0, 1], axis=2, mode="nearest")
    dx = ndimage.correlate1d(dx, [1, 2, 1], axis=1, mode="nearest")
    dy = ndimage.correlate1d(x, [-1, 0, 1], axis=1, mode="nearest")
    dy = ndimage.correlate1d(dy, [1, 2, 1], axis=2, mode="nearest")
    size = np.abs(dx) + np.abs(dy)
    padded = np.pad(size, ((0, 0), (1, 1), (1, 1)))
    height, width = x.shape[1:]

    def beside(down: int, right: int) -> Floats:
        return padded[:, 1 + down : 1 + down + height, 1 + right : 1 + right + width]

    slope = math.tan(math.pi / 8)
    flat = np.abs(dy) < slope * np.abs(dx)
    steep = np.abs(dy) > (slope + 2) * np.abs(dx)  # tan 67.5 = tan 22.5 + 2
    falling = (size > beside(-1, -1)) & (size > beside(1, 1))
    rising = (size > beside(-1, 1)) & (size > beside(1, -1))
    ridge = np.select(
        [flat, steep, dx * dy >= 0],
        [
            (size > beside(0, -1)) & (size >= beside(0, 1)),
            (size > beside(-1, 0)) & (size >= beside(1, 0)),
            falling,
        ],
        rising,
    )
    weak = ridge & (size > low)
    neighbours = np.zeros((3, 3, 3), dtype=bool)
    neighbours[1] = True  # all eight in the same image, none in another one
    labels, _ = ndimage.label(weak, neighbours)
    strong = np.unique(labels[weak & (size > high)])
    return np.isin(labels, strong) & weak
