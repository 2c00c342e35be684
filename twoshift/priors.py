"""Label distributions: plain numpy vectors that are non-negative and sum to one.

``named("backward-50", classes=10)`` builds any distribution that the command line accepts. Forward
means long-tailed as in training, backward the reverse. ``order`` lists the classes from the most to
the least frequent one in training; without it class 0 is taken as the most frequent, as in the
long-tailed CIFAR sets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twoshift.errors import PriorError
from twoshift.registry import near_miss

Prior = NDArray[np.float64]
EXAMPLES = ("uniform", "forward-50", "backward-50", "permuted-50", "dirichlet-0.1")
KINDS = frozenset(example.partition("-")[0] for example in EXAMPLES)


def check_prior(prior: ArrayLike, classes: int | None = None, whose: str = "prior") -> Prior:
    """Return ``prior`` as float64, or raise an error if it is not a label distribution.

    Args:
        prior: Share of every class.
        classes: Number of classes, if it is known.
        whose: Name of the distribution, for messages.
    """
    try:
        p = np.asarray(prior, dtype=np.float64)
    except (TypeError, ValueError):
        raise PriorError(whose, must_be="a vector of numbers", got=repr(prior)) from None
    if p.ndim != 1 or p.size == 0:
        raise PriorError(whose, must_be="a vector", got=f"shape {p.shape}")
    if classes is not None and p.size != classes:
        must_be = f"of length {classes}, the number of classes"
        raise PriorError(whose, must_be=must_be, got=f"length {p.size}")
    if not np.isfinite(p).all():
        raise PriorError(whose, must_be="finite", got=f"{p[~np.isfinite(p)][0]}")
    if (p < 0).any():
        worst = int(p.argmin())
        raise PriorError(whose, must_be="non-negative", got=f"{p[worst]:.4g} for class {worst}")
    total = float(p.sum())
    if abs(total - 1) > 1e-4:
        must_be, got = "a distribution (sum 1)", f"sum {total:.6g}"
        raise PriorError(whose, must_be=must_be, got=got, cure="Divide by it.")
    return p / total


def from_counts(counts: Sequence[int] | NDArray[np.int64]) -> Prior:
    """Share of every class, from its number of images."""
    c = np.asarray(counts, dtype=np.float64)
    if c.ndim != 1 or c.size == 0 or (c < 0).any() or c.sum() == 0:
        raise PriorError("class counts", must_be="non-negative, not all zero", got=f"{counts}")
    return c / c.sum()


def uniform(classes: int) -> Prior:
    """All classes equally likely."""
    return np.full(classes, 1 / classes)


def longtail(classes: int, ratio: float) -> Prior:
    """Exponential profile: class 0 is ``ratio`` times as likely as the last one."""
    if not ratio >= 1:
        raise PriorError("imbalance ratio", must_be="at least 1", got=ratio)
    p = float(ratio) ** (-np.arange(classes) / max(classes - 1, 1))
    return p / p.sum()


def reverse(prior: Prior, order: Sequence[int] | None = None) -> Prior:
    """The shares in reverse order: the most frequent class gets that of the rarest, and so on."""
    by_rank = np.arange(len(prior)) if order is None else np.asarray(order)
    flipped = np.empty_like(prior)
    flipped[by_rank] = prior[by_rank[::-1]]
    return flipped


def power(prior: Prior, exponent: float) -> Prior:
    """``prior ** exponent``, normalised: 1 keeps the prior, 0 is uniform, -1 inverts it."""
    if exponent < 0 and (prior == 0).any():
        raise PriorError("prior has a class of probability 0, which has no inverse")
    log_p = exponent * np.log(np.where(prior > 0, prior, 1.0))
    p = np.where((prior > 0) | (exponent == 0), np.exp(log_p - log_p.max()), 0.0)
    return p / p.sum()


def permuted(classes: int, ratio: float, rng: np.random.Generator) -> Prior:
    """The long-tailed profile in a random class order."""
    return longtail(classes, ratio)[rng.permutation(classes)]


def dirichlet(classes: int, concentration: float, rng: np.random.Generator) -> Prior:
    """A draw from a symmetric Dirichlet; a small concentration favours few classes."""
    if not concentration > 0:
        raise PriorError("Dirichlet concentration", must_be="positive", got=concentration)
    return rng.dirichlet(np.full(classes, concentration))


def anywhere(source: Prior, rng: np.random.Generator) -> Prior:
    """Draw a label distribution that a stream may have; three kinds are equally likely.

    The first is a power of the source's, from more extreme than itself to more extreme than its
    inverse; the second is the same with permuted classes; the third is a Dirichlet draw, with
    anything from a few classes to nearly uniform shares.
    """
    kind = rng.integers(3)
    if kind == 2:
        return dirichlet(len(source), float(10 ** rng.uniform(-1, 1)), rng)
    tilted = power(source, float(rng.uniform(-1.5, 1.5)))
    return rng.permutation(tilted) if kind else tilted


def class_order(counts: ArrayLike) -> NDArray[np.int64]:
    """Classes from the most to the least frequent; ties keep their order."""
    return np.argsort(-np.asarray(counts, dtype=np.float64), kind="stable").astype(np.int64)


def named(name: str, classes: int, *, order: Sequence[int] | None = None, seed: int = 0) -> Prior:
    """Build a label distribution by name.

    Names are ``uniform``, ``forward-R``, ``backward-R`` and ``permuted-R`` with an imbalance ratio,
    and ``dirichlet-A`` with a concentration. Only the permutation and the Dirichlet draw depend on
    the seed.
    """
    kind, _, argument = name.partition("-")
    if kind not in KINDS or bool(argument) == (kind == "uniform"):
        raise PriorError(f"unknown label distribution {name!r}", cure=near_miss(name, EXAMPLES))
    if kind == "uniform":
        return uniform(classes)
    try:
        value = float(argument)
    except ValueError:
        what, must_be = f"label distribution {name!r}", f"{kind}-NUMBER"
        raise PriorError(what, must_be=must_be, got=repr(argument)) from None
    rng = np.random.default_rng([seed, 0x5EED])
    if kind == "permuted":
        return permuted(classes, value, rng)
    if kind == "dirichlet":
        return dirichlet(classes, value, rng)
    prior = np.empty(classes)
    prior[slice(None) if order is None else list(order)] = longtail(classes, value)
    return prior if kind == "forward" else reverse(prior, order)
