"""How images are cut: streams into batches, and the list of all batches into parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from twoshift.data.stream import batch_edges
from twoshift.predict.inputs import Gallery

PART = 4096  # images
CHUNK = 1024  # images that the first of several passes adapts to at once


class Batch(NamedTuple):
    """Images of one stream that are predicted together.

    Attributes:
        stream: Name of the stream.
        number: Position in its stream, from 0.
        start: Position of the first image in the gallery.
        stop: Position after the last.
    """

    stream: str
    number: int
    start: int
    stop: int


def cut(gallery: Gallery, batch_size: int) -> list[Batch]:
    """All batches. They depend on the list of images only, not on parts or on who reads them."""
    batches, start = [], 0
    for stream, images in itertools.groupby(gallery.streams):
        edges = batch_edges(sum(1 for _ in images), batch_size, "merge")
        for number, (a, b) in enumerate(itertools.pairwise(edges)):
            batches.append(Batch(stream, number, start + a, start + b))
        start += edges[-1]
    return batches


def chunk_of(batch_size: int) -> int:
    """Number of batches that the first of several passes adapts to at once."""
    return -(-CHUNK // batch_size)


def parts_of(batches: Sequence[Batch], images: int = PART, together: int = 1) -> list[list[Batch]]:
    """Batches in parts of at least so many images; the last one may have fewer.

    Args:
        batches: All batches.
        images: Least number of images of a part.
        together: So many batches of a stream, from its first, are never parted.
    """
    parts, present, count = [], list[Batch](), 0
    for batch in batches:
        if count >= images and batch.number % together == 0:
            parts.append(present)
            present, count = [], 0
        present.append(batch)
        count += batch.stop - batch.start
    return [*parts, present] if present else parts
