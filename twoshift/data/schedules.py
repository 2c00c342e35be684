"""Label distributions that change over a stream, by name.

``named("drift-50", classes=10)`` builds any that the command line accepts, also those that stay
the same, of `twoshift.priors`. A schedule draws two sets of images of the same size, one for each
of its two distributions, no image twice, and says when they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from twoshift import priors
from twoshift.data.label_shift import (
    Indices,
    check_available,
    check_support,
    count_labels,
    generator,
    largest,
    pool_within,
    wanted_counts,
)
from twoshift.errors import DataError, PriorError, SettingError
from twoshift.priors import Prior
from twoshift.registry import Registry, near_miss

EXAMPLES = ("drift-50", "switch-50")
PARTS = {"drift": 10, "switch": 2}  # of a stream, in which another order may rearrange the images

# a schedule takes the number of images of either distribution, and gives their times, from 0 to 1
schedules: Registry[Callable[[int, int, Generator], NDArray[np.float64]]] = Registry(
    "schedule", "twoshift.data"
)


@schedules.register("drift")
def drift(first: int, last: int, rng: Generator) -> NDArray[np.float64]:
    """drift-R: forward-R that turns into backward-R, little by little."""
    # densities 2 (1 - t) and 2 t: at time t, the shares of the two are 1 - t and t
    return np.concatenate([1 - np.sqrt(rng.random(first)), np.sqrt(rng.random(last))])


@schedules.register("switch")
def switch(first: int, last: int, rng: Generator) -> NDArray[np.float64]:
    """switch-R: forward-R in the first half, backward-R in the second."""
    return np.concatenate([rng.random(first), 1 + rng.random(last)]) / 2


@dataclass(frozen=True, eq=False)
class Schedule:
    """A label distribution that changes over a stream.

    Attributes:
        kind: Registered name.
        first: Label distribution at the start.
        last: Label distribution at the end.
    """

    kind: str
    first: Prior
    last: Prior

    @property
    def mean(self) -> Prior:
        """Label distribution of the whole stream."""
        return (self.first + self.last) / 2

    @property
    def parts(self) -> int:
        """Number of equal parts of the stream in which images may be rearranged."""
        return PARTS[self.kind]

    def draw(
        self, labels: Indices, seed: int, pool: int | None = None, images: int | None = None
    ) -> Indices:
        """Indices of a subset, without replacement, in the order in which they arrive.

        Args:
            labels: Labels of all available images.
            seed: Seed of the draw.
            pool: Number of images of the most likely class of either distribution; by default the
                largest for which every class has enough images.
            images: At most so many images: a smaller pool.
        """
        available = count_labels(labels, len(self.first))
        if pool is None:
            pool = self._largest_pool(available)
        elif pool < 1:
            raise SettingError("pool", must_be="at least 1", got=pool)
        if images is not None:
            pool = pool_within(images, pool, self._counts)
        first, last = wanted_counts(self.first, pool), wanted_counts(self.last, pool)
        check_available(first + last, available)
        rng = generator(seed, 0x5C4E)
        rows: tuple[list[Indices], list[Indices]] = ([], [])
        for c in np.flatnonzero(first + last):
            members = rng.choice(np.flatnonzero(labels == c), first[c] + last[c], replace=False)
            rows[0].append(members[: first[c]])
            rows[1].append(members[first[c] :])
        times = schedules[self.kind](int(first.sum()), int(last.sum()), rng)
        return np.concatenate([*rows[0], *rows[1]])[np.argsort(times)].astype(np.int64)

    def _counts(self, pool: int) -> Indices:
        return wanted_counts(self.first, pool) + wanted_counts(self.last, pool)

    def _largest_pool(self, available: Indices) -> int:
        check_support(available, self.mean)
        most = int(available.max())
        pool = largest(most, lambda pool: bool((self._counts(pool) <= available).all()))
        if not pool:
            raise DataError(
                "images of the most likely classes",
                must_be="enough for both distributions of a schedule",
                got=f"{int(available.min())} in the smallest class",
            )
        return pool


def named(
    name: str, classes: int, *, order: Sequence[int] | None = None, seed: int = 0
) -> Prior | Schedule:
    """Build a label distribution by name: one of `twoshift.priors`, or one that changes.

    Besides the names of `twoshift.priors.named`, there are ``drift-R`` and ``switch-R``: from
    ``forward-R`` to ``backward-R``, little by little or at once.

    Args:
        name: The name.
        classes: Number of classes.
        order: Classes from the most to the least frequent one in training.
        seed: Seed of random distributions.
    """
    kind, _, ratio = name.partition("-")
    build = partial(priors.named, classes=classes, order=order, seed=seed)
    if kind in priors.KINDS:
        return build(name)
    if kind not in schedules or not ratio:
        known = (*priors.EXAMPLES, *EXAMPLES)
        raise PriorError(f"unknown label distribution {name!r}", cure=near_miss(name, known))
    try:
        return Schedule(kind, build(f"forward-{ratio}"), build(f"backward-{ratio}"))
    except PriorError as e:
        raise PriorError(f"label distribution {name!r}: {e}") from e
