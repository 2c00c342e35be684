"""Draw images so that their labels follow a prior."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twoshift.errors import DataError, SettingError
from twoshift.priors import Prior, check_prior

Indices = NDArray[np.int64]

_ROUNDING = 1e-6  # 1000 * (1 / 50) must give 20 images, not 19


def draw(
    labels: Indices,
    prior: ArrayLike,
    seed: int,
    pool: int | None = None,
    images: int | None = None,
) -> Indices:
    """Indices of a shuffled subset, without replacement, whose labels follow ``prior``.

    The most likely class gets ``pool`` images, class c gets ``int(pool * prior[c] / max(prior))``.

    Args:
        labels: Labels of all available images.
        prior: Target label distribution.
        seed: Seed of the draw; the same seed gives the same indices in the same order.
        pool: Number of images of the most likely class; by default the largest for which every
            class has enough images.
        images: At most so many images: a smaller pool, so that the labels still follow the prior.
    """
    p = check_prior(prior)
    available = count_labels(labels, len(p))
    if pool is None:
        pool = _largest_pool(available, p)
    elif pool < 1:
        raise SettingError("pool", must_be="at least 1", got=pool)
    if images is not None:
        pool = pool_within(images, pool, lambda pool: wanted_counts(p, pool))
    counts = wanted_counts(p, pool)
    check_available(counts, available)
    rng = generator(seed, 0xD4A3)
    members = {c: np.flatnonzero(labels == c) for c in np.flatnonzero(counts)}
    rows = [rng.choice(members[c], counts[c], replace=False) for c in members]
    return rng.permutation(np.concatenate(rows)).astype(np.int64)


def wanted_counts(prior: Prior, pool: int) -> Indices:
    """Number of images of every class under ``prior`` if the most likely class has ``pool``."""
    return np.floor(pool * (prior / prior.max()) + _ROUNDING).astype(np.int64)


def pool_within(images: int, pool: int, counts: Callable[[int], Indices]) -> int:
    """The largest pool, at most ``pool``, with at most ``images`` images in all.

    Args:
        images: Number of images that the stream may have.
        pool: Number of images of the most likely class, if nothing is left out.
        counts: Number of images of every class, from a pool.
    """
    fitting = largest(pool, lambda size: int(counts(size).sum()) <= images)
    if not fitting:
        fewest = int(counts(1).sum())
        must_be = f"at least {fewest}, with one image of the most likely class"
        raise SettingError("images of a stream", must_be=must_be, got=images)
    return fitting


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to ``most`` that fits, where all smaller ones do; 0 if none."""
    return bisect_right(range(1, most + 1), False, key=lambda number: not fits(number))


def check_available(counts: Indices, available: Indices) -> None:
    """Refuse to draw more images of a class than there are."""
    short = np.flatnonzero(counts > available)
    if short.size:
        c = short[0]
        raise DataError(
            f"class {c}: {counts[c]} images needed, {available[c]} available",
            cure="Choose a smaller pool, or a prior with less of that class.",
        )


def generator(seed: int, purpose: int) -> np.random.Generator:
    """A random generator for one purpose; with the same seed, purposes draw independently."""
    if seed < 0:
        raise SettingError("seed", must_be="0 or more", got=seed)
    return np.random.default_rng([seed, purpose])


def check_support(available: Indices, prior: Prior) -> Indices:
    """The classes that a prior has; each of them must have images."""
    support = np.flatnonzero(prior)
    empty = support[available[support] == 0]
    if empty.size:
        cure = "Set its share to 0, or choose a pool."
        raise DataError(f"class {empty[0]}: images needed, 0 available", cure=cure)
    return support


def count_labels(labels: Indices, classes: int) -> Indices:
    """Number of images of every class; labels that are none of the classes are refused."""
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        got = f"{labels.dtype} {labels.shape}"
        raise DataError("labels", must_be="a vector of integers", got=got)
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        must_be = f"0 to {classes - 1}, the classes of the prior"
        raise DataError("labels", must_be=must_be, got=f"{labels.min()} to {labels.max()}")
    return np.bincount(labels, minlength=classes).astype(np.int64)


def _largest_pool(available: Indices, prior: Prior) -> int:
    support = check_support(available, prior)
    return int((available[support] * (prior.max() / prior[support])).min() + _ROUNDING)
