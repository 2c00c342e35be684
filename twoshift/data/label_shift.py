"""Draw images so that their labels follow a prior, and arrange them in time."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twoshift.errors import DataError, SettingError
from twoshift.priors import Prior, check_prior
from twoshift.registry import check_numbers

Indices = NDArray[np.int64]

_ROUNDING = 1e-6  # 1000 * (1 / 50) must give 20 images, not 19


def draw(labels: Indices, prior: ArrayLike, seed: int, pool: int | None = None) -> Indices:
    """Indices of a shuffled subset, without replacement, whose labels follow ``prior``.

    The most likely class gets ``pool`` images, class c gets ``int(pool * prior[c] / max(prior))``.

    Args:
        labels: Labels of all available images.
        prior: Target label distribution.
        seed: Seed of the draw; the same seed gives the same indices in the same order.
        pool: Number of images of the most likely class; by default the largest for which every
            class has enough images.
    """
    p = check_prior(prior)
    available = _count(labels, len(p))
    if pool is None:
        pool = _largest_pool(available, p)
    elif pool < 1:
        raise SettingError("pool", must_be="at least 1", got=pool)
    counts = wanted_counts(p, pool)
    short = np.flatnonzero(counts > available)
    if short.size:
        c = short[0]
        raise DataError(
            f"class {c}: {counts[c]} images needed, {available[c]} available",
            cure="Choose a smaller pool, or a prior with less of that class.",
        )
    rng = generator(seed, 0xD4A3)
    members = {c: np.flatnonzero(labels == c) for c in np.flatnonzero(counts)}
    rows = [rng.choice(members[c], counts[c], replace=False) for c in members]
    return rng.permutation(np.concatenate(rows)).astype(np.int64)


def wanted_counts(prior: Prior, pool: int) -> Indices:
    """Number of images of every class under ``prior`` if the most likely class has ``pool``."""
    return np.floor(pool * (prior / prior.max()) + _ROUNDING).astype(np.int64)


def correlated(labels: Indices, concentration: float, slots: int, seed: int) -> Indices:
    """An order in which labels come in bursts, as a permutation of ``range(len(labels))``.

    Time is divided into slots. Every class spreads its images over the slots by a draw from a
    symmetric Dirichlet distribution; within a slot the classes follow one another in random order.

    Args:
        labels: Labels of the drawn images.
        concentration: Parameter of the Dirichlet distribution: if small, a class comes in few
            slots; if large, evenly in all of them.
        slots: Number of time slots.
        seed: Seed of the order.
    """
    check_numbers("a correlated order", "above 0 and finite", concentration=concentration)
    check_numbers("a correlated order", "a whole number from 1", slots=slots)
    rng = generator(seed, 0xC0DE)
    runs: list[list[Indices]] = [[] for _ in range(slots)]
    for c in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == c))
        shares = rng.dirichlet(np.full(slots, concentration))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for slot, run in zip(runs, np.split(members, cuts), strict=True):
            slot.append(run)
    ordered = [slot[i] for slot in runs for i in rng.permutation(len(slot))]
    return np.concatenate([np.empty(0, np.int64), *ordered])


def generator(seed: int, purpose: int) -> np.random.Generator:
    """A random generator for one purpose; with the same seed, purposes draw independently."""
    if seed < 0:
        raise SettingError("seed", must_be="0 or more", got=seed)
    return np.random.default_rng([seed, purpose])


def _largest_pool(available: Indices, prior: Prior) -> int:
    support = np.flatnonzero(prior)
    empty = support[available[support] == 0]
    if empty.size:
        cure = "Set its share to 0, or choose a pool."
        raise DataError(f"class {empty[0]}: images needed, 0 available", cure=cure)
    return int((available[support] * (prior.max() / prior[support])).min() + _ROUNDING)


def _count(labels: Indices, classes: int) -> Indices:
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        got = f"{labels.dtype} {labels.shape}"
        raise DataError("labels", must_be="a vector of integers", got=got)
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        must_be = f"0 to {classes - 1}, the classes of the prior"
        raise DataError("labels", must_be=must_be, got=f"{labels.min()} to {labels.max()}")
    return np.bincount(labels, minlength=classes).astype(np.int64)
