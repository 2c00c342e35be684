"""Images that stay in their files until they are read, and are then decoded by Pillow in threads.

The pixels equal those of torchvision's loaders: images are converted to RGB without the alpha
channel, their EXIF orientation is ignored, and they are resized bilinearly with antialiasing.
Decoded images are cached if the whole set fits into a quarter of the free memory, or into
``TWOSHIFT_CACHE_MB``. Processes that run side by side share that memory and the cores.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import psutil  # type: ignore[import-untyped]
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from twoshift.data.base import ImageSet, LazyImages, Rows
from twoshift.errors import DataCorrupt, DataError, DataMissing, SettingError

CACHE_MB = "TWOSHIFT_CACHE_MB"
PROCESS_COUNTS = ("LOCAL_WORLD_SIZE", "TWOSHIFT_WORKERS")  # torchrun sets the first
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")  # no PostScript, which is run
CURE = "Restore the file, or skip unreadable images: --skip-bad"
Bytes = NDArray[np.uint8]
T = TypeVar("T")


def frame_of(size: int) -> int:
    """The usual side of the square that test images are cut from, where nobody says otherwise."""
    return round(size * 8 / 7)


class ImageFiles(LazyImages):
    """Images in files: JPEG, PNG, WebP, BMP, GIF, PPM or TIFF, in any mode that Pillow reads.

    Args:
        paths: Path of the file of every image.
        size: Side of the test-time view, which is the centre of the frame.
        frame: Side of the square that images are resized to; training crops are cut from it.
        squash: Whether to resize both sides to the frame, as SHOT does. Otherwise the shorter side
            is resized to it and the longer one is cropped evenly, as is usual for ImageNet.
    """

    def __init__(
        self, paths: Sequence[str | Path], size: int = 224, frame: int = 256, squash: bool = False
    ) -> None:
        if not 1 <= size <= frame:
            raise SettingError("size", must_be=f"1 to {frame}, the side of the frame", got=size)
        self.size, self.frame, self.squash = size, frame, squash
        self._frames = _Frames(tuple(map(Path, paths)), frame, squash)
        self._rows = np.arange(len(paths))

    @property
    def paths(self) -> tuple[Path, ...]:
        """Path of the file of every image."""
        return tuple(self._frames.paths[row] for row in self._rows)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the array that all images would make: (N, size, size, 3)."""
        return len(self._rows), self.size, self.size, 3

    def __getitem__(self, rows: Rows) -> Bytes:
        """The centres of the frames at ``rows``."""
        margin = round((self.frame - self.size) / 2)  # rounded as torchvision does
        return self._frames.read(self._rows[rows], slice(margin, margin + self.size))

    def framed(self, rows: Rows) -> Bytes:
        """The whole frames at ``rows``."""
        return self._frames.read(self._rows[rows], slice(None))

    def subset(self, rows: Rows) -> ImageFiles:
        """The images at ``rows``; the cache of decoded images is shared."""
        frame_rows = self._rows[rows]
        if self._frames.cache is None:  # a part may fit into memory even if the whole does not
            paths = [self._frames.paths[row] for row in frame_rows]
            return ImageFiles(paths, self.size, self.frame, self.squash)
        part = ImageFiles((), self.size, self.frame, self.squash)
        part._frames, part._rows = self._frames, frame_rows
        return part

    def identity(self) -> str | None:
        """Hash of everything that determines the pixels, without reading them; None if unknown."""
        digest = hashlib.sha256(f"{self.size} {self.frame} {self.squash}".encode())
        for path in self.paths:
            try:
                file = path.stat()
            except OSError:
                return None
            changed = max(file.st_mtime_ns, file.st_ctime_ns)
            if changed > self._frames.created:  # the cached pixels may be older
                return None
            digest.update(f"{path.absolute()!r} {file.st_size} {changed}\n".encode())
        return digest.hexdigest()

    def __reduce__(self) -> tuple[object, ...]:
        # another process decodes its own images
        return ImageFiles, (self.paths, self.size, self.frame, self.squash)


class _Frames:
    """Decoded frames of files: cached if all of them fit, else decoded on every read."""

    def __init__(self, paths: tuple[Path, ...], side: int, squash: bool) -> None:
        self.paths, self.side, self.squash = paths, side, squash
        self._cache: Bytes | None = None
        self._is_cached = np.zeros(len(paths), bool)
        self._allocated, self._lock = False, threading.Lock()
        self.created = time.time_ns()

    @property
    def cache(self) -> Bytes | None:
        """Memory for all frames, or None if they do not fit; allocated when first needed."""
        with self._lock:
            if not self._allocated:
                shape = (len(self.paths), self.side, self.side, 3)
                if _reserve(math.prod(shape)):
                    weakref.finalize(self, _reserve, -math.prod(shape))
                    self._cache = np.empty(shape, np.uint8)  # takes memory only as it is filled
                self._allocated = True
            return self._cache

    def read(self, rows: NDArray[np.int64], window: slice) -> Bytes:
        """The frames at ``rows``, or the square ``window`` of them."""
        cache = self.cache
        if cache is None:
            side = len(range(self.side)[window])
            out = np.empty((len(rows), side, side, 3), np.uint8)

            def decode(i: int) -> None:
                out[i] = self._decode(rows[i])[window, window]

            in_threads(decode, range(len(rows)))
            return out

        def fill(row: int) -> None:
            cache[row] = self._decode(row)
            self._is_cached[row] = True  # set last: other threads may then read the pixels

        # two readers may decode the same image: they write the same bytes
        in_threads(fill, np.unique(rows[~self._is_cached[rows]]).tolist())
        return cache[:, window, window][rows]

    def _decode(self, row: int) -> Bytes:
        return decode_frame(self.paths[row], self.side, self.squash)


def decode_frame(path: Path, side: int, squash: bool, encoded: bytes | None = None) -> Bytes:
    """Decode an image to a square of ``side`` pixels, (side, side, 3).

    Args:
        path: The file, or what to call the image in messages.
        side: Side of the square.
        squash: See `ImageFiles`.
        encoded: Content of the file, if it is not on the disk.
    """
    opened = open_image(path) if encoded is None else _open(BytesIO(encoded), path, FORMATS)
    try:
        with opened as image:
            return np.asarray(_to_frame(_to_rgb(image), side, squash))
    except FileNotFoundError as e:
        raise DataMissing(f"image {path} does not exist", cure=CURE) from e
    except DataCorrupt:
        raise
    except UnidentifiedImageError as e:  # its message names the open file, not the path
        raise DataCorrupt(f"cannot decode {path}: no image of a known format", cure=CURE) from e
    except Exception as e:  # Pillow raises nearly any error on a damaged file
        what = f"cannot decode {path}: {str(e) or type(e).__name__}"
        raise DataCorrupt(what, cure=CURE) from e


@contextmanager
def open_image(path: Path, formats: tuple[str, ...] = FORMATS) -> Iterator[Image.Image]:
    """Open an image file; its pixels are not read yet.

    Args:
        path: The file; a pipe or a device is an error, and not waited for.
        formats: The formats to try, whatever the file is called.
    """
    # does not wait for a pipe; and what was checked is read, wherever the path leads later
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise DataCorrupt(f"{path}", must_be="an image file", got="no file", cure=CURE)
        with _open(file, path, formats) as image:
            yield image


@contextmanager
def _open(file: BinaryIO, path: Path, formats: tuple[str, ...]) -> Iterator[Image.Image]:
    try:
        with Image.open(file, formats=formats) as image:
            if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):
                raise Image.DecompressionBombError  # Pillow warns only, up to twice as many
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
        limit = f"at most {Image.MAX_IMAGE_PIXELS:,} pixels"
        raise DataCorrupt(f"{path} is too large to decode", must_be=limit, cure=CURE) from e


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits per pixel, which Pillow would clip to 255
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(f"mode {image.mode} with values outside 0 to 65535")
        image = Image.fromarray((values >> 8).astype(np.uint8))  # as Pillow reads 16-bit colours
    elif image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _to_frame(image: Image.Image, side: int, squash: bool) -> Image.Image:
    bilinear = Image.Resampling.BILINEAR
    if squash:
        return image.resize((side, side), bilinear)
    shorter, longer = sorted(image.size)
    if longer > 100 * shorter:  # a resized line of pixels would fill the memory
        raise ValueError(f"{image.width} x {image.height} pixels is too narrow")
    width, height = (int(side * length / shorter) for length in image.size)
    left, top = round((width - side) / 2), round((height - side) / 2)
    whole = image.resize((width, height), bilinear)
    return whole.crop((left, top, left + side, top + side))


def in_threads(work: Callable[[int], T], rows: Sequence[int]) -> list[T]:
    """Results of ``work`` in order; Pillow releases Python's lock while it decodes."""
    workers = min(len(rows), _cores() // _processes(), 8)
    if workers <= 1:
        return list(map(work, rows))
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, rows))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processes() -> int:
    """Number of processes that share this machine, this one included, as set by their launcher."""
    values = (os.environ.get(name, "") for name in PROCESS_COUNTS)
    return next((int(count) for count in values if count.isdecimal() and int(count)), 1)


_reserved_bytes, _reserving = 0, threading.RLock()  # a finalizer may run inside the lock


def _reserve(size: int) -> bool:
    """Reserve ``size`` bytes of this process' budget if it has them; a negative size frees them."""
    global _reserved_bytes
    with _reserving:
        if size > 0 and _reserved_bytes + size > _budget():
            return False
        _reserved_bytes += size
        return True


def _budget() -> int:
    megabytes = os.environ.get(CACHE_MB)
    if megabytes is None:
        return free_memory() // 4 // _processes()
    try:
        return int(float(megabytes) * 2**20) // _processes()
    except (ValueError, OverflowError):
        raise SettingError(CACHE_MB, must_be="a number of megabytes", got=repr(megabytes)) from None


@functools.cache  # measured once: images cached later must not shrink the budget
def free_memory() -> int:
    """Bytes that this process may still use, limited by the machine and by its control group."""
    free = [psutil.virtual_memory().available]
    try:
        name = Path("/proc/self/cgroup").read_text().partition("0::/")[2].strip()
    except OSError:
        return free[0]
    group = Path("/sys/fs/cgroup", name)
    for folder in (group, *group.parents):
        try:
            limit, used = ((folder / f"memory.{x}").read_text() for x in ("max", "current"))
            free.append(int(limit) - int(used))
        except (OSError, ValueError):  # no limit on this level
            continue
    return max(min(free), 0)


def unreadable(images: LazyImages) -> dict[int, DataError]:
    """Errors of the images that cannot be decoded, by row; the others are cached if they fit."""

    def problem(row: int) -> DataError | None:
        try:
            images[np.array([row])]
        except DataError as e:
            return e
        return None

    errors = in_threads(problem, range(len(images)))
    return {row: error for row, error in enumerate(errors) if error is not None}


def drop_bad(data: ImageSet) -> ImageSet:
    """The data set without the images that cannot be decoded; ``skipped`` counts them."""
    if not isinstance(data.images, LazyImages):
        return data
    if not (bad := unreadable(data.images)):
        return data
    if len(bad) == len(data):
        what = f"none of the {len(data)} images of {data.name} can be read; the first: "
        raise DataCorrupt(what + bad[0].what)
    good = np.setdiff1d(np.arange(len(data)), list(bad))
    return replace(data.subset(good), skipped=data.skipped + len(bad))
