"""The geometry behind the corruptions: blurs, zooms, the plasma map, drops of water.

Everything here is elementwise over the images, so that a picture's result never depends on the
others it is computed with.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]


def gray(x: Floats) -> Floats:
    """Luma of (..., C) images, as (..., 1); one channel is its own luma."""
    if x.shape[-1] == 1:
        return x
    red, green, blue = np.split(x, 3, axis=-1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def gaussian(x: Floats, sigma: float, mode: str = "nearest", truncate: float = 4.0) -> Floats:
    """Gaussian blur of (N, H, W, ...) over height and width."""
    return ndimage.gaussian_filter(x, sigma, mode=mode, truncate=truncate, axes=(1, 2))


def disk(radius: float, alias_blur: float) -> Floats:
    """A disk that sums to 1, its rim smoothed by a small Gaussian."""
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
    """Correlate (N, H, W, C) with an odd square kernel; the border mirrors without its edge."""
    reach = len(kernel) // 2
    height, width = x.shape[1:3]
    padded = np.pad(x, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="reflect")
    out = np.zeros_like(x)
    for dy, dx in np.argwhere(kernel):  # most of a small disk's grid is zero
        out += kernel[dy, dx] * padded[:, dy : dy + height, dx : dx + width]
    return out


def motion_blur(x: Floats, radius: float, sigma: float, angles: Floats) -> Floats:
    """Blur each of (N, H, W, C) along its angle by a one-sided Gaussian, edges repeated."""
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
    """Zoom into the centre of (H, W, ...), bilinear, corner on corner, and keep the size."""
    for axis in (0, 1):
        side = x.shape[axis]
        crop = math.ceil(side / factor)
        zoomed = round(crop * factor)
        at = np.arange(side) + (zoomed - side) // 2
        where = at * (crop - 1) / (zoomed - 1)
        low = np.minimum(where.astype(int), crop - 2)
        share = (where - low).reshape((-1,) + (1,) * (x.ndim - 1 - axis))
        low += (side - crop) // 2
        x = x.take(low, axis) * (1 - share) + x.take(low + 1, axis) * share
    return x


def shuffle_locally(x: Bytes, offsets: NDArray[np.int64]) -> Bytes:
    """Let the inner pixels take the value of a neighbour, one by one from the last to the first.

    The benchmark's script means to swap two pixels, but its views make it a copy; so do we.

    Args:
        x: The images, (N, H, W, C).
        offsets: Vertical and horizontal displacements, (rounds, H - 2d, W - 2d, 2, N) where d is
            the largest; they belong to the pixels from H - d down to d + 1.
    """
    count, height, width = x.shape[:3]
    rounds, rows, columns = offsets.shape[:3]
    margin = (height - rows) // 2
    # which pixel stands where, as one flat array: a copy is then a single take
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
    """Diamond-square maps that wrap around, scaled to 0..1.

    Args:
        noise: (N, side, side) uniform in -1..1, one value for each point; side is a power of two.
        decay: What the roughness is divided by from one grid to the next finer one.
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
    """How light breaks in drops of liquid of thickness (N, H, W): 0..1, the brightest is 1.

    Distances are exact Euclidean ones; the benchmark's come from a 5x5 chamfer approximation.
    """
    edges = _canny(layer.astype(np.float64))
    far = np.full(layer.shape, 20.0)
    for i in np.flatnonzero(edges.any((1, 2))):  # without an edge every distance is "far"
        far[i] = np.minimum(ndimage.distance_transform_edt(~edges[i]), 20)
    depth = np.floor(_box(far) + 1e-9)  # sums of equal values may fall short by rounding
    depth = np.stack([_equalise(d) for d in depth])
    relief = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], dtype=np.float64)
    lit = np.clip(correlate(depth[..., None], relief)[..., 0], 0, 255)
    out = layer * np.rint(_box(lit))
    highest = out.max((1, 2), keepdims=True)
    return np.divide(out, highest, out=np.zeros_like(out), where=highest > 0)


def _box(x: Floats) -> Floats:
    return correlate(x[..., None], np.ones((3, 3)))[..., 0] / 9


def _equalise(x: Floats) -> Floats:
    """Spread the histogram of one image of small whole numbers over 0..255."""
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
    touching = np.zeros((3, 3, 3), dtype=bool)
    touching[1] = True  # eight neighbours, none of them in another image
    labels, _ = ndimage.label(weak, touching)
    strong = np.unique(labels[weak & (size > high)])
    return np.isin(labels, strong) & weak
