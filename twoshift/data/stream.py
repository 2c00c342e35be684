"""Streams of batches, as a deployed model receives them; the same seed gives the same batches.

Join streams of several data sets or priors with ``itertools.chain``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from twoshift.data.base import ImageSet, LazyImages
from twoshift.data.label_shift import correlated, draw
from twoshift.errors import DataError, SettingError
from twoshift.priors import Prior, check_prior, from_counts
from twoshift.registry import near_miss

Order = Literal["shuffled", "correlated"]
Last = Literal["merge", "keep", "drop"]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Batch:
    """Images that arrive together, with their labels.

    Attributes:
        x: Images, float32 in [0, 1], (B, C, H, W).
        y: Labels, int64 (B,). For metrics only: methods do not get them.
        step: Position of the batch in its stream, from 0.
    """

    x: Tensor
    y: Tensor
    step: int


class Stream:
    """Batches whose labels follow a prior; can be iterated any number of times.

    Args:
        data: Data set that the images are drawn from.
        prior: Target label distribution; by default that of ``data``, which draws all images.
        batch_size: Number of images per batch.
        seed: Seed of the draw of the images, and of their order.
        pool: Number of images of the most likely class; see `twoshift.data.label_shift.draw`.
        order: ``"shuffled"``, or ``"correlated"``: labels come in bursts.
        concentration: Concentration of the correlated order; smaller means longer bursts.
        slots: Number of time slots of the correlated order; by default one per class.
        last: Treatment of an incomplete last batch, which would give poor batch statistics:
            ``"merge"`` joins it to the batch before if it is less than half full, ``"keep"`` keeps
            it, ``"drop"`` drops it.

    Attributes:
        indices: Rows of ``data`` in stream order, which results record.
        target: Target label distribution.
        prior: Label distribution of the images in the stream.
    """

    def __init__(
        self,
        data: ImageSet,
        prior: ArrayLike | None = None,
        *,
        batch_size: int = 64,
        seed: int = 0,
        pool: int | None = None,
        order: Order = "shuffled",
        concentration: float = 0.1,
        slots: int | None = None,
        last: Last = "merge",
    ) -> None:
        if batch_size < 1:
            raise SettingError("batch_size", must_be="at least 1", got=batch_size)
        _check_choice("order", order, get_args(Order))
        _check_choice("last", last, get_args(Last))
        _check_images(data)
        classes = len(data.classes)
        self.data, self.batch_size = data, batch_size
        if prior is None:
            prior, pool = from_counts(data.counts), int(data.counts.max())
        self.target: Prior = check_prior(prior, classes, "prior of the stream")

        indices = draw(data.labels, self.target, seed, pool)
        if order == "correlated":
            slots = classes if slots is None else slots
            indices = indices[correlated(data.labels[indices], concentration, slots, seed)]
        self._edges = batch_edges(len(indices), batch_size, last)
        self.indices: NDArray[np.int64] = indices[: self._edges[-1]]
        if not len(self):
            raise DataError(
                f"a stream of {len(indices)} images",
                must_be=f"at least one batch of {batch_size}",
                cure='Choose a smaller batch or last="keep".',
            )
        self.prior: Prior = from_counts(np.bincount(self.labels, minlength=classes))

    @property
    def labels(self) -> NDArray[np.int64]:
        """Labels in stream order."""
        return self.data.labels[self.indices]

    def __len__(self) -> int:
        """Number of batches."""
        return len(self._edges) - 1

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self.data.images, LazyImages):
            return prefetch(self._batch, len(self))
        return map(self._batch, range(len(self)))

    def _batch(self, step: int) -> Batch:
        rows = self.indices[self._edges[step] : self._edges[step + 1]]
        y = torch.from_numpy(self.data.labels[rows]).long()
        return Batch(to_float(self.data.images[rows]), y, step)


def prefetch(make: Callable[[int], T], count: int) -> Iterator[T]:
    """Yield ``make(0)``, ``make(1)``, ...; while one is used, a thread makes the next."""
    if count == 0:
        return
    item = make(0)
    for i in range(1, count):
        # leaving the block waits for the thread, even if the consumer stops early
        with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
            upcoming = pool.submit(make, i)
            pool.shutdown(wait=False)  # the thread ends by itself if the consumer never returns
            yield item
        item = upcoming.result()
    yield item


def batch_edges(images: int, batch_size: int, last: Last) -> list[int]:
    """Indices at which the batches start, followed by the index at which the stream ends."""
    full, rest = divmod(images, batch_size)
    edges = [i * batch_size for i in range(full + 1)]
    if not rest or last == "drop":
        return edges
    if last == "merge" and full and 2 * rest < batch_size:
        return [*edges[:-1], images]
    return [*edges, images]


def to_float(images: NDArray[np.uint8]) -> Tensor:
    """Convert uint8 (B, H, W, C) to float32 (B, C, H, W) in [0, 1]; colour stays channels last."""
    x = torch.from_numpy(images).permute(0, 3, 1, 2)
    layout = torch.channels_last if x.shape[1] > 1 else torch.contiguous_format
    return x.to(torch.float32, memory_format=layout).div_(255)


def _check_choice(setting: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SettingError(f"{setting} {value!r} is unknown", cure=near_miss(value, known))


def _check_images(data: ImageSet) -> None:
    images = data.images
    if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(data.labels):
        must_be = f"uint8 ({len(data.labels)}, H, W, C), one per label"
        got = f"{images.dtype} {images.shape}"
        raise DataError(f"images of {data.name!r}", must_be=must_be, got=got)
