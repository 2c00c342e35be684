import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twoshift import priors
from twoshift.data.label_shift import draw, wanted_counts
from twoshift.errors import DataError, PriorError, SettingError


def balanced(classes, each):
    return np.random.default_rng(1).permutation(np.repeat(np.arange(classes), each))


@settings(deadline=None)
@given(
    st.integers(2, 12),
    st.integers(1, 80),
    st.sampled_from(["uniform", "forward-50", "backward-10", "permuted-25", "dirichlet-0.5"]),
    st.integers(0, 10**6),
)
def test_counts_follow_the_formula_without_repeats(classes, each, name, seed):
    labels = balanced(classes, each)
    prior = priors.named(name, classes, seed=seed)
    rows = draw(labels, prior, seed)
    assert rows.dtype == np.int64
    assert len(set(rows.tolist())) == len(rows)
    drawn = Counter(labels[rows].tolist())
    for c in range(classes):
        exact = each * prior[c] / max(prior)
        # a product that is an integer up to rounding counts as that integer
        expected = round(exact) if math.isclose(exact, round(exact), abs_tol=1e-6) else int(exact)
        assert drawn[c] == expected
    assert max(drawn.values()) == each


@pytest.mark.parametrize("ratio", [10, 25, 50, 100])
@pytest.mark.parametrize("classes", [10, 100])
def test_rounding_never_costs_an_image(ratio, classes):
    counts = wanted_counts(priors.longtail(classes, ratio), 1000)
    assert counts[0] == 1000
    assert counts[-1] == Fraction(1000, ratio)
    assert (np.diff(counts) <= 0).all()
    assert (
        wanted_counts(priors.longtail(classes, ratio)[::-1], 1000).tolist() == counts.tolist()[::-1]
    )


def test_uniform_takes_every_image_of_a_balanced_set_once():
    rows = draw(balanced(7, 13), priors.uniform(7), seed=3)
    assert sorted(rows.tolist()) == list(range(7 * 13))


def test_seeds_repeat_and_differ():
    labels, prior = balanced(10, 50), priors.longtail(10, 10)
    first = draw(labels, prior, seed=0)
    assert np.array_equal(first, draw(labels, prior, seed=0))
    other = draw(labels, prior, seed=1)
    assert len(other) == len(first)
    assert set(other.tolist()) != set(first.tolist())


def test_the_result_is_shuffled_even_if_the_file_is_sorted():
    labels = np.repeat(np.arange(10), 100)
    drawn = labels[draw(labels, priors.uniform(10), seed=0)]
    first, second = drawn[:500].mean(), drawn[500:].mean()
    assert abs(first - second) < 0.8  # sorted: 5
    assert (np.diff(drawn) == 0).mean() < 0.2  # sorted: 0.99


def test_every_image_of_a_class_can_be_drawn():
    labels = np.repeat(np.arange(2), 20)
    drawn = {i for seed in range(60) for i in draw(labels, [0.5, 0.5], seed, pool=3).tolist()}
    assert drawn == set(range(40))


def test_the_pool_is_the_largest_that_every_class_has_enough_for():
    labels = np.array([0] * 30 + [1] * 20 + [2] * 5)
    drawn = labels[draw(labels, [0.5, 0.5, 0.0], seed=0)]
    assert Counter(drawn.tolist()) == {0: 20, 1: 20}
    drawn = labels[draw(labels, [0.5, 0.3, 0.2], seed=0)]
    assert Counter(drawn.tolist()) == {0: 12, 1: 7, 2: 4}  # 13 would need 5.2 of class 2


def test_pool_decides_the_size():
    labels = np.array([0] * 30 + [1] * 20 + [2] * 5)
    drawn = labels[draw(labels, [0.5, 0.25, 0.25], seed=0, pool=10)]
    assert Counter(drawn.tolist()) == {0: 10, 1: 5, 2: 5}


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=6),
    st.sampled_from(["uniform", "forward-10", "dirichlet-1"]),
    st.integers(10, 200),
)
def test_at_most_so_many_images_is_the_largest_pool_that_fits(sizes, name, images):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    prior = priors.named(name, len(sizes))
    rows = draw(labels, prior, seed=1, images=images)
    best = draw(labels, prior, seed=1)
    for pool in range(max(sizes), 0, -1):  # try them all
        counts = wanted_counts(prior, pool)
        if (counts <= sizes).all() and counts.sum() <= min(images, len(best)):
            break
    assert np.bincount(labels[rows], minlength=len(sizes)).tolist() == counts.tolist()


def test_too_large_a_pool_is_refused_with_the_numbers():
    labels = np.array([0] * 30 + [1] * 20 + [2] * 5)
    with pytest.raises(DataError, match="class 2: 6 images needed, 5 available"):
        draw(labels, priors.uniform(3), seed=0, pool=6)


def test_a_class_without_images():
    labels = np.array([0, 0, 2, 2])
    with pytest.raises(DataError, match="class 1: images needed, 0 available"):
        draw(labels, priors.uniform(3), seed=0)
    # a share too small for a single image needs none
    rows = draw(labels, [0.6, 0.1, 0.3], seed=0, pool=2)
    assert Counter(labels[rows].tolist()) == {0: 2, 2: 1}


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.empty(0, np.int64), "0 available"),
        (np.array([0, 1, 3]), "0 to 2"),
        (np.array([0, -1]), "0 to 2"),
        (np.array([[0, 1]]), "vector of integers"),
        (np.array([0.0, 1.0]), "vector of integers"),
    ],
)
def test_bad_labels_are_refused(labels, message):
    with pytest.raises(DataError, match=message):
        draw(labels, priors.uniform(3), seed=0)


def test_bad_settings_are_refused():
    labels = balanced(3, 5)
    with pytest.raises(SettingError, match="pool, must be at least 1, got 0"):
        draw(labels, priors.uniform(3), seed=0, pool=0)
    with pytest.raises(SettingError, match="seed"):
        draw(labels, priors.uniform(3), seed=-1)
    with pytest.raises(PriorError):
        draw(labels, [0.5, 0.4, 0.3], seed=0)
