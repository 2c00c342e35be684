"""Pixels of the images to predict; one that cannot be read is told apart, and stops nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twoshift.data.files import decode_frame, in_threads
from twoshift.data.stream import prefetch, to_float
from twoshift.errors import DataError, SettingError
from twoshift.predict.inputs import Gallery, Raw
from twoshift.predict.plan import Batch

LUMA = np.array([19595, 38470, 7471], np.uint32)  # of Pillow, in 65536ths
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Decoding:
    """How encoded images become pixels.

    Attributes:
        size: Side of the images that the model sees.
        frame: Side of the square that these are cut from.
        squash: Whether the whole image is resized to the frame, changing its proportions.
        channels: 3, or 1 for grey.
    """

    size: int = 224
    frame: int = 256
    squash: bool = False
    channels: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.frame:
            must_be = f"1 to {self.frame}, the side of the frame"
            raise SettingError("size of the images", must_be=must_be, got=self.size)

    def pixels(self, raw: Raw, name: str) -> Bytes:
        """The pixels of an image, (size, size, channels); arrays are taken as they are."""
        if isinstance(raw, DataError):
            raise raw
        if isinstance(raw, np.ndarray):
            return raw
        encoded, path = (None, raw) if isinstance(raw, Path) else (raw, Path(name))
        framed = decode_frame(path, self.frame, self.squash, encoded)
        margin = round((self.frame - self.size) / 2)  # rounded as torchvision does
        view = framed[margin : margin + self.size, margin : margin + self.size]
        if self.channels == 3:
            return view
        return ((view @ LUMA + 0x8000) >> 16).astype(np.uint8)[..., None]


class Seen(NamedTuple):
    """A batch of images, read.

    Attributes:
        batch: Which one.
        x: Those that could be read, float32 (B, C, H, W) in [0, 1]; None if there is none.
        positions: Their positions in the gallery.
        errors: Why the others could not, by position.
    """

    batch: Batch
    x: Tensor | None
    positions: list[int]
    errors: dict[int, str]


def read_batches(gallery: Gallery, decoding: Decoding, batches: Sequence[Batch]) -> Iterator[Seen]:
    """Read batches one by one; while one is used, threads decode the next."""
    return prefetch(lambda i: read_batch(gallery, decoding, batches[i]), len(batches))


def read_batch(gallery: Gallery, decoding: Decoding, batch: Batch) -> Seen:
    """Read a batch."""
    positions = range(batch.start, batch.stop)
    raws = gallery.fetch(gallery.rows[batch.start : batch.stop].tolist())

    def decode(i: int) -> Bytes | str:
        try:
            return decoding.pixels(raws[i], gallery.ids[positions[i]])
        except DataError as e:
            return e.what  # the cures that readers of data sets name are none here

    results = in_threads(decode, range(len(raws)))
    good = [i for i, result in enumerate(results) if not isinstance(result, str)]
    errors = {positions[i]: str(r) for i, r in enumerate(results) if isinstance(r, str)}
    pixels = [result for result in results if not isinstance(result, str)]
    x = to_float(np.stack(pixels)) if pixels else None
    return Seen(batch, x, [positions[i] for i in good], errors)


def as_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Images in the floating-point type of the model."""
    return x if x.dtype == dtype else x.to(dtype)
