"""Orders of streams: each a permutation, repeatable, and with labels as its name says."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twoshift.data.label_shift import generator
from twoshift.data.orders import (
    BURST,
    EXAMPLES,
    arranged,
    bursts,
    by_class,
    check_order,
    correlated,
    markov,
    orders,
)
from twoshift.errors import SettingError

NAMES = [*EXAMPLES, "bursts-1", "bursts-0.001", "bursts-1000", "markov-0", "markov-1"]


def balanced(classes, each):
    return np.random.default_rng(1).permutation(np.repeat(np.arange(classes), each))


def rng(seed=0):
    return generator(seed, 0xC0DE)


def test_examples_are_all_orders():
    assert {name.partition("-")[0] for name in EXAMPLES} == set(orders)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=300), st.sampled_from(NAMES), st.integers(0, 10**6))
def test_an_order_is_a_repeatable_permutation(labels, name, seed):
    labels = np.array(labels, dtype=np.int64)
    order = arranged(name, labels, rng(seed))
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(len(labels)))
    assert np.array_equal(order, arranged(name, labels, rng(seed)))


@pytest.mark.parametrize("name", ["correlated", "sorted", "bursts-0.1", "markov-0.9"])
def test_another_seed_gives_another_order(name):
    labels = balanced(10, 50)
    assert not np.array_equal(arranged(name, labels, rng(0)), arranged(name, labels, rng(1)))


def test_shuffled_images_stay_as_they_are():
    assert arranged("shuffled", balanced(3, 5), rng()).tolist() == list(range(15))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("burst-0.1", "order 'burst-0.1' is unknown. Did you mean 'bursts-0.1'"),
        ("bursts", "Did you mean 'bursts-0.1'"),
        ("sorted-3", "Did you mean 'sorted'"),
        ("shufled", "Did you mean 'shuffled'"),
        ("", "Known: bursts-0.1, correlated"),
        ("bursts-", "must be bursts-NUMBER, got ''"),
        ("markov-often", "must be markov-NUMBER, got 'often'"),
        ("bursts-0", "A of order bursts-A, must be above 0 and finite"),
        ("bursts-inf", "above 0 and finite"),
        ("bursts-nan", "above 0 and finite"),
        ("markov-1.5", "P of order markov-P, must be from 0 to 1"),
        ("markov-nan", "from 0 to 1"),
    ],
)
def test_what_is_no_order(name, says):
    with pytest.raises(SettingError, match=says):
        check_order(name)


# -- bursts -----------------------------------------------------------------------------------


def shares(labels, classes=10):
    return np.bincount(labels, minlength=classes) / len(labels)


def unevenness(labels, window=50):
    """Mean L1 distance between the labels of a window and those of all."""
    windows = labels[: len(labels) // window * window].reshape(-1, window)
    return np.mean([np.abs(shares(w) - shares(labels)).sum() for w in windows])


def test_every_burst_has_another_label_distribution():
    labels = balanced(10, 1000)
    arrived = labels[bursts(labels, rng(), 0.1)]
    by_burst = [shares(arrived[i : i + BURST]) for i in range(0, 6000, BURST)]
    apart = [np.abs(a - b).sum() for a, b in itertools.pairwise(by_burst)]
    assert np.median(apart) > 1.5  # shuffled: 0.35
    # within a burst it is the same one: the two halves of each are alike
    halves = [arrived[i : i + BURST].reshape(2, -1) for i in range(0, 6000, BURST)]
    assert np.median([np.abs(shares(a) - shares(b)).sum() for a, b in halves]) < 0.3


def test_a_larger_concentration_gives_milder_bursts():
    labels = balanced(10, 500)
    uneven = [unevenness(labels[bursts(labels, rng(), a)], BURST) for a in (0.1, 1, 1000)]
    assert uneven[0] > uneven[1] + 0.3 > uneven[2] + 0.6
    assert uneven[2] < 0.35  # as shuffled


def slow_bursts(labels, concentration, seed):
    """Image by image, from piles of images; a class that is used up has no share."""
    source = rng(seed)
    piles = {c: [i for i, label in enumerate(labels) if label == c] for c in range(max(labels) + 1)}
    order = []
    for position in range(len(labels)):
        if position % 128 == 0:
            drawn = source.dirichlet([concentration] * len(piles))
        weights = [drawn[c] if piles[c] else 0.0 for c in piles]
        if sum(weights) == 0:
            weights = [len(piles[c]) for c in piles]
        level, total = source.random() * sum(weights), 0.0
        for c in piles:
            total += weights[c]
            if total > level:
                break
        order.append(piles[c].pop(0))
    return order


@pytest.mark.parametrize("concentration", [0.01, 0.1, 1.0])
def test_bursts_are_those_of_the_slow_reference(concentration):
    labels = balanced(6, 60)
    found = bursts(labels, rng(4), concentration).tolist()
    assert found == slow_bursts(labels.tolist(), concentration, 4)


# -- sorted and markov ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_sorted_is_one_run_per_class(seed):
    labels = balanced(10, 20)
    order = by_class(labels, rng(seed))
    runs = [c for c, _ in itertools.groupby(labels[order].tolist())]
    assert len(runs) == 10
    assert runs != sorted(runs)
    for c in range(10):  # within a class as drawn
        assert order[labels[order] == c].tolist() == np.flatnonzero(labels == c).tolist()


@pytest.mark.parametrize("stay", [0.0, 0.5, 0.9, 1.0])
def test_the_class_stays_as_often_as_said(stay):
    labels = balanced(10, 1000)
    arrived = labels[markov(labels, rng(), stay)]
    kept = (np.diff(arrived[:5000]) == 0).mean()
    # where it does not stay, it may be drawn again
    assert kept == pytest.approx(stay + (1 - stay) * 0.1, abs=0.03 if stay < 1 else 0.001)


# -- correlated -------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 5), max_size=200),
    st.floats(1e-3, 1e3),
    st.integers(1, 30),
    st.integers(0, 10**6),
)
def test_a_correlated_order_is_a_repeatable_permutation(labels, concentration, slots, seed):
    labels = np.array(labels, dtype=np.int64)
    order = correlated(labels, rng(seed), concentration, slots)
    assert sorted(order.tolist()) == list(range(len(labels)))
    assert np.array_equal(order, correlated(labels, rng(seed), concentration, slots))


def test_labels_come_in_few_slots():
    labels = balanced(10, 200)
    assert unevenness(labels) < 0.5
    assert unevenness(labels[correlated(labels, rng(), 0.1, 10)]) > 1.0


def test_by_default_there_are_as_many_slots_as_classes():
    labels = balanced(10, 200)
    by_default = correlated(labels, rng())
    assert np.array_equal(by_default, correlated(labels, rng(), 0.1, 10))


def test_a_large_concentration_spreads_every_class_over_all_slots():
    labels = balanced(10, 200)
    even = labels[correlated(labels, rng(), 1e6, 20)]
    assert unevenness(even, window=100) < 0.2
    sharp = labels[correlated(labels, rng(), 0.01, 20)]
    assert unevenness(sharp, window=100) > 1.0


@pytest.mark.parametrize(
    ("concentration", "slots"), [(0, 5), (-1, 5), (math.nan, 5), (math.inf, 5), (0.1, 0)]
)
def test_bad_correlation_is_refused(concentration, slots):
    with pytest.raises(SettingError):
        correlated(balanced(3, 5), rng(), concentration, slots)
