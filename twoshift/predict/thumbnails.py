"""Small pictures of some images, for a page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO

import numpy as np
from PIL import Image

from twoshift.errors import DataError
from twoshift.predict.inputs import Gallery
from twoshift.predict.reading import Decoding

SIDE = 96  # pixels


def thumbnails(gallery: Gallery, decoding: Decoding, positions: Sequence[int]) -> list[str]:
    """Images at some positions as data URLs; an empty text for one that cannot be read any more."""
    raws = gallery.fetch([int(gallery.rows[p]) for p in positions])
    names = [gallery.ids[p] for p in positions]
    found = []
    for raw, name in zip(raws, names, strict=True):
        try:
            found.append(_coded(decoding.pixels(raw, name)))
        except DataError:
            found.append("")
    return found


def _coded(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> str:
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    if max(picture.size) > SIDE:
        picture.thumbnail((SIDE, SIDE))
    file = BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
