"""Orders in which the images of a stream arrive, by name.

``arranged("bursts-0.1", labels, rng)`` is a permutation of the images: every one arrives once.
Names are ``shuffled``, ``correlated``, ``sorted``, ``bursts-A`` with a concentration and
``markov-P`` with a probability.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from twoshift.data.label_shift import Indices
from twoshift.errors import SettingError
from twoshift.registry import Registry, check_numbers, near_miss

EXAMPLES = ("shuffled", "correlated", "sorted", "bursts-0.1", "markov-0.9")
BURST = 128  # images of one burst

# an order takes the labels of shuffled images, a random generator, and the number in its name
orders: Registry[Callable[..., Indices]] = Registry("order", "twoshift.data")


def arranged(name: str, labels: Indices, rng: Generator, **settings: Any) -> Indices:
    """A permutation of ``range(len(labels))``, by the name of the order.

    Args:
        name: ``"shuffled"``, ``"bursts-0.1"`` ...
        labels: Labels of the images, which are shuffled already.
        rng: Source of chance.
        settings: Settings of the order that are not in its name.
    """
    kind, dash, text = name.partition("-")
    takes_number = {example.partition("-")[0]: "-" in example for example in EXAMPLES}
    if takes_number.get(kind) is not bool(dash):
        raise SettingError(f"order {name!r} is unknown", cure=near_miss(name, EXAMPLES))
    if not dash:
        return orders[kind](labels, rng, **settings)
    try:
        number = float(text)
    except ValueError:
        must_be = f"{kind}-NUMBER"
        raise SettingError(f"order {name!r}", must_be=must_be, got=repr(text)) from None
    return orders[kind](labels, rng, number, **settings)


def check_order(name: str) -> None:
    """Refuse the name of an order that does not exist, or has a number out of range."""
    arranged(name, np.empty(0, np.int64), np.random.default_rng(0))


@orders.register("shuffled")
def shuffled(labels: Indices, rng: Generator) -> Indices:
    """As the images were drawn: in random order."""
    return np.arange(len(labels))


@orders.register("correlated")
def correlated(
    labels: Indices, rng: Generator, concentration: float = 0.1, slots: int | None = None
) -> Indices:
    """Slots of time: every class comes in few of them, in one run per slot.

    Every class spreads its images over the slots by a draw from a symmetric Dirichlet distribution;
    within a slot the classes follow one another in random order.

    Args:
        labels: Labels of the drawn images.
        rng: Source of chance.
        concentration: Parameter of the Dirichlet distribution: if small, a class comes in few
            slots; if large, evenly in all of them.
        slots: Number of time slots; by default one per class.
    """
    classes = np.unique(labels)
    slots = max(len(classes), 1) if slots is None else slots
    check_numbers("a correlated order", "above 0 and finite", concentration=concentration)
    check_numbers("a correlated order", "a whole number from 1", slots=slots)
    runs: list[list[Indices]] = [[] for _ in range(slots)]
    for c in classes:
        members = rng.permutation(np.flatnonzero(labels == c))
        shares = rng.dirichlet(np.full(slots, concentration))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for slot, run in zip(runs, np.split(members, cuts), strict=True):
            slot.append(run)
    ordered = [slot[i] for slot in runs for i in rng.permutation(len(slot))]
    return np.concatenate([np.empty(0, np.int64), *ordered])


@orders.register("sorted")
def by_class(labels: Indices, rng: Generator) -> Indices:
    """One class after another, the classes in random order."""
    rank = rng.permutation(_classes(labels))
    return np.argsort(rank[labels], kind="stable")


@orders.register("bursts")
def bursts(labels: Indices, rng: Generator, concentration: float) -> Indices:
    """bursts-A: every 128 images another label distribution, drawn from Dirichlet(A).

    Once the images of a class are used up, the distribution is that of the other classes.

    Args:
        labels: Labels of the drawn images.
        rng: Source of chance.
        concentration: Parameter of the Dirichlet distribution: if small, a burst has few classes.
    """
    check_numbers("order bursts-A", "above 0 and finite", A=concentration)
    shares = np.empty(0)

    def next_class(position: int, left: Indices) -> int:
        nonlocal shares
        if position % BURST == 0:
            shares = rng.dirichlet(np.full(len(left), concentration))
        return _draw_class(np.where(left > 0, shares, 0.0), left, rng)

    return _one_by_one(labels, next_class)


@orders.register("markov")
def markov(labels: Indices, rng: Generator, stay: float) -> Indices:
    """markov-P: with probability P an image of the same class as the last, else any image.

    Args:
        labels: Labels of the drawn images.
        rng: Source of chance.
        stay: Probability that the class stays.
    """
    check_numbers("order markov-P", "from 0 to 1", P=stay)
    last = -1

    def next_class(position: int, left: Indices) -> int:
        nonlocal last
        if last < 0 or rng.random() >= stay or not left[last]:
            last = _draw_class(left, left, rng)
        return last

    return _one_by_one(labels, next_class)


def _one_by_one(labels: Indices, next_class: Callable[[int, Indices], int]) -> Indices:
    """The order in which the classes are called; each call takes the next image of its class.

    Args:
        labels: Labels of the images.
        next_class: Calls a class, from the position and the number of images left of every class.
    """
    left = np.bincount(labels, minlength=_classes(labels))
    by_label = np.argsort(labels, kind="stable")
    ends = np.cumsum(left)
    order = np.empty(len(labels), np.int64)
    for position in range(len(labels)):
        c = next_class(position, left)
        order[position] = by_label[ends[c] - left[c]]
        left[c] -= 1
    return order


def _draw_class(weights: NDArray[Any], left: Indices, rng: Generator) -> int:
    """A class in proportion to weights; where they are all 0, to the images that are left."""
    steps = np.cumsum(weights if weights.any() else left)
    return int(np.searchsorted(steps, rng.random() * steps[-1], side="right"))


def _classes(labels: Indices) -> int:
    return int(labels.max(initial=-1)) + 1
