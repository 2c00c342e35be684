"""Streams of batches, as a deployed model receives them; the same seed gives the same batches.

Join streams of several data sets or priors with ``itertools.chain``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from twoshift.data.base import ImageSet, LazyImages
from twoshift.data.label_shift import draw, generator
from twoshift.data.orders import arranged, check_order
from twoshift.data.schedules import Schedule
from twoshift.errors import DataError, SettingError
from twoshift.priors import Prior, check_prior, from_counts
from twoshift.registry import check_numbers, near_miss

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
        data: Data set that the images are drawn from. Of several, which hold the same images under
            different conditions, each gives one of as many equal parts of the stream, in turn.
        prior: Target label distribution, or a schedule of a changing one; by default that of
            ``data``, which draws all images.
        batch_size: Number of images per batch.
        seed: Seed of the draw of the images, and of their order.
        pool: Number of images of the most likely class; see `twoshift.data.label_shift.draw`.
        images: At most so many images: the draw is smaller, its labels are distributed as before.
        order: Name of an order: ``"shuffled"``, ``"correlated"``, ``"sorted"``, ``"bursts-0.1"``,
            ``"markov-0.9"``; see `twoshift.data.orders`. Under a schedule it holds within tenths of
            a drift and halves of a switch, so that labels still change as the schedule says.
        concentration: Concentration of the correlated order; smaller means longer bursts.
        slots: Number of time slots of the correlated order; by default one per class.
        last: Treatment of an incomplete last batch, which would give poor batch statistics:
            ``"merge"`` joins it to the batch before if it is less than half full, ``"keep"`` keeps
            it, ``"drop"`` drops it.

    Attributes:
        data: The data set; of several, the first, with the origins of all.
        indices: Rows of ``data`` in stream order, which results record.
        target: Target label distribution; under a schedule its mean.
        prior: Label distribution of the images in the stream.
    """

    def __init__(
        self,
        data: ImageSet | Sequence[ImageSet],
        prior: ArrayLike | Schedule | None = None,
        *,
        batch_size: int = 64,
        seed: int = 0,
        pool: int | None = None,
        images: int | None = None,
        order: str = "shuffled",
        concentration: float = 0.1,
        slots: int | None = None,
        last: Last = "merge",
    ) -> None:
        if batch_size < 1:
            raise SettingError("batch_size", must_be="at least 1", got=batch_size)
        if images is not None:
            check_numbers("a stream", "a whole number from 1", images=images)
        check_order(order)
        _check_choice("last", last, get_args(Last))
        self._sets = (data,) if isinstance(data, ImageSet) else tuple(data)
        self.data, self.batch_size = _described(self._sets), batch_size
        labels, classes = self.data.labels, len(self.data.classes)
        if prior is None:
            prior, pool = from_counts(self.data.counts), int(self.data.counts.max())

        if isinstance(prior, Schedule):
            self.target: Prior = check_prior(prior.mean, classes, "prior of the stream")
            indices, parts = prior.draw(labels, seed, pool, images), prior.parts
        else:
            self.target = check_prior(prior, classes, "prior of the stream")
            indices, parts = draw(labels, self.target, seed, pool, images), 1
        rng, settings = generator(seed, 0xC0DE), dict[str, Any]()
        if order == "correlated":
            slots = classes if slots is None else slots
            settings = {"concentration": concentration, "slots": slots}
        indices = np.concatenate(
            [
                part[arranged(order, labels[part], rng, **settings)]
                for part in np.array_split(indices, parts)
            ]
        )
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

    @property
    def batch_priors(self) -> NDArray[np.float64]:
        """Label distribution of every batch, (batches, classes)."""
        parts = np.split(self.labels, self._edges[1:-1])
        classes = len(self.data.classes)
        return np.stack([from_counts(np.bincount(p, minlength=classes)) for p in parts])

    @property
    def cuts(self) -> list[int]:
        """Positions at which the images of each data set start, and where the stream ends."""
        count = len(self._sets)
        return [i * len(self.indices) // count for i in range(count + 1)]

    def __len__(self) -> int:
        """Number of batches."""
        return len(self._edges) - 1

    def __iter__(self) -> Iterator[Batch]:
        if any(isinstance(data.images, LazyImages) for data in self._sets):
            return prefetch(self._batch, len(self))
        return map(self._batch, range(len(self)))

    def _batch(self, step: int) -> Batch:
        start, stop = self._edges[step], self._edges[step + 1]
        y = torch.from_numpy(self.data.labels[self.indices[start:stop]]).long()
        pieces = []
        for data, (first, end) in zip(self._sets, itertools.pairwise(self.cuts), strict=True):
            if len(rows := self.indices[max(start, first) : min(stop, end)]):
                pieces.append(data.images[rows])
        return Batch(to_float(pieces[0] if len(pieces) == 1 else np.concatenate(pieces)), y, step)


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


def _described(sets: Sequence[ImageSet]) -> ImageSet:
    """The data set of a stream: the first one, with the origins of all; all must fit together."""
    if not sets:
        raise DataError("data sets of a stream", must_be="at least one", got="none")
    first = sets[0]
    for data in sets:
        _check_images(data)
        same_shape = data.images.shape == first.images.shape
        if not (same_shape and np.array_equal(data.labels, first.labels)):
            raise DataError(
                "data sets of a stream",
                must_be="the same images in the same order, under different conditions",
                got=f"{len(data)} images of {data.name!r}, {len(first)} of {first.name!r}",
            )
    if len(sets) == 1:
        return first
    origin = "; ".join(dict.fromkeys(data.origin for data in sets))
    return replace(first, origin=origin, skipped=max(data.skipped for data in sets))


def _check_images(data: ImageSet) -> None:
    images = data.images
    if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(data.labels):
        must_be = f"uint8 ({len(data.labels)}, H, W, C), one per label"
        got = f"{images.dtype} {images.shape}"
        raise DataError(f"images of {data.name!r}", must_be=must_be, got=got)
