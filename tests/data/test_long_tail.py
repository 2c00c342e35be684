from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoshift.data.cifar import cifar10
from twoshift.data.long_tail import class_counts, long_tailed_indices, outside
from twoshift.errors import DataError, SettingError

PROFILES = ("exponential", "pareto", "step")


def balanced(classes: int, per_class: int) -> np.ndarray:
    return np.random.default_rng(1).permutation(np.repeat(np.arange(classes), per_class))


def published_subset(labels: np.ndarray, factor: float) -> list[int]:
    """The published protocol, step by step, on numpy's global generator."""
    state = np.random.get_state()
    np.random.seed(0)
    rows: list[int] = []
    classes = max(labels) + 1
    for c in range(classes):
        size = int((len(labels) / classes) * factor ** (c / (classes - 1.0)))
        members = np.array([i for i, label in enumerate(labels) if label == c])
        np.random.shuffle(members)
        rows += members[:size].tolist()
    np.random.set_state(state)
    return rows


@pytest.mark.parametrize(("classes", "per_class", "total"), [(10, 5000, 12406), (100, 500, 10847)])
def test_the_published_sizes(classes, per_class, total):
    labels = balanced(classes, per_class)
    assert len(long_tailed_indices(labels, 100)) == total
    assert class_counts("exponential", per_class, classes, 100).sum() == total


@pytest.mark.parametrize("ratio", [1, 10, 50, 100])
def test_the_published_subset(ratio):
    labels = balanced(10, 200)
    assert long_tailed_indices(labels, ratio).tolist() == published_subset(labels, 1 / ratio)


def test_the_published_subset_of_cifar10(shared_data):
    labels = cifar10("train", shared_data).labels
    rows = long_tailed_indices(labels, 100)
    assert len(rows) == 12406
    assert rows.tolist() == published_subset(labels, 0.01)
    np.testing.assert_array_equal(
        np.bincount(labels[rows]), [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    )


def test_the_global_generator_is_not_used():
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    long_tailed_indices(balanced(3, 10), 2)
    assert np.random.rand() == expected


def test_pareto_by_hand():
    # quantiles of three classes: (1/3)^(-1/6) = 1.20094, (2/3)^(-1/6) = 1.06991, 1
    middle = 10 + (100 - 10) * (1.06991 - 1) / (1.20094 - 1)
    assert class_counts("pareto", 100, 3, 10).tolist() == [100, math.floor(middle), 10]


def test_pareto_is_like_imagenet_lt():
    counts = class_counts("pareto", 1280, 1000, 256)
    assert (counts[0], counts[-1]) == (1280, 5)
    assert 100 <= counts.mean() <= 130  # ImageNet-LT: 115.8


def test_step_by_hand():
    assert class_counts("step", 100, 4, 20).tolist() == [100, 100, 5, 5]
    assert class_counts("step", 100, 5, 20).tolist() == [100, 100, 100, 5, 5]


@given(
    profile=st.sampled_from(PROFILES),
    largest=st.integers(1, 3000),
    classes=st.integers(1, 60),
    share=st.floats(0, 1),
)
def test_counts_fall_from_largest_to_smallest(profile, largest, classes, share):
    ratio = largest**share  # 1 to largest: all of them are possible
    counts = class_counts(profile, largest, classes, ratio)
    assert counts.dtype == np.int64
    assert len(counts) == classes
    assert counts[0] == largest
    assert (np.diff(counts) <= 0).all()
    if classes > 1:
        assert abs(counts[-1] - largest / ratio) <= 1


@pytest.mark.parametrize("profile", PROFILES)
def test_the_largest_possible_ratio_leaves_one_image(profile):
    for largest in (1, 49, 98, 103, 500):  # 49 * (1 / 49) < 1 in floating point
        assert class_counts(profile, largest, 2, largest).tolist() == [largest, 1]


@pytest.mark.parametrize("profile", PROFILES)
def test_ratio_one_is_balanced(profile):
    for classes in range(1, 30):
        assert set(class_counts(profile, 11, classes, 1).tolist()) == {11}


@pytest.mark.parametrize(("largest", "classes"), [(5000, 10), (500, 100)])
def test_every_integer_ratio_has_the_published_counts(largest, classes):
    for ratio in range(1, 501):
        published = [int(largest * (1 / ratio) ** (i / (classes - 1))) for i in range(classes)]
        assert class_counts("exponential", largest, classes, ratio).tolist() == published


@given(
    per_class=st.integers(4, 30),
    classes=st.integers(1, 8),
    ratio=st.floats(1, 4),
    profile=st.sampled_from(PROFILES),
    seed=st.integers(0, 5),
)
def test_a_subset_and_its_complement(per_class, classes, ratio, profile, seed):
    labels = balanced(classes, per_class)
    inside = long_tailed_indices(labels, ratio, profile, seed)
    left_out = outside(labels, inside)
    assert inside.dtype == left_out.dtype == np.int64
    assert sorted([*inside.tolist(), *left_out.tolist()]) == list(range(len(labels)))
    expected = class_counts(profile, per_class, classes, ratio)
    np.testing.assert_array_equal(np.bincount(labels[inside], minlength=classes), expected)


def test_the_seed_decides_which_images():
    labels = balanced(5, 50)
    first = long_tailed_indices(labels, 10, seed=1)
    assert first.tolist() == long_tailed_indices(labels, 10, seed=1).tolist()
    assert first.tolist() != long_tailed_indices(labels, 10, seed=2).tolist()


def test_ratio_one_keeps_all():
    labels = balanced(4, 25)
    assert len(long_tailed_indices(labels, 1)) == 100
    assert len(outside(labels, long_tailed_indices(labels, 1))) == 0


@pytest.mark.parametrize("ratio", [0.5, 0, -3, float("nan"), float("inf")])
def test_a_ratio_below_one_is_refused(ratio):
    with pytest.raises(DataError, match="imbalance ratio"):
        class_counts("exponential", 100, 10, ratio)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_ratio_that_empties_a_class_is_refused(profile):
    with pytest.raises(DataError, match="without images") as caught:
        class_counts(profile, 100, 10, 101)
    assert "at most 100" in str(caught.value)


def test_an_unknown_profile_is_refused_with_a_hint():
    with pytest.raises(SettingError, match="Did you mean 'exponential'"):
        class_counts("exponentiel", 100, 10, 10)


@pytest.mark.parametrize(("largest", "classes"), [(0, 10), (100, 0)])
def test_a_long_tail_needs_images_and_classes(largest, classes):
    with pytest.raises(DataError, match="at least one"):
        class_counts("step", largest, classes, 2)


def unbalanced(counts) -> np.ndarray:
    return np.random.default_rng(2).permutation(np.repeat(np.arange(len(counts)), counts))


@given(
    counts=st.lists(st.integers(1, 60), min_size=2, max_size=6),
    ratio=st.floats(1.01, 20),
    profile=st.sampled_from(PROFILES),
    by_size=st.booleans(),
)
def test_unbalanced_sets_give_the_largest_possible_tail(counts, ratio, profile, by_size):
    def tail(largest):  # counts from head to tail, or None if a class would be empty
        try:
            return class_counts(profile, largest, len(counts), ratio)
        except DataError:
            return None

    order = sorted(range(len(counts)), key=lambda c: -counts[c]) if by_size else range(len(counts))
    available = [counts[c] for c in order]
    fitting = [
        t for n in range(1, 1 + max(counts)) if (t := tail(n)) is not None and all(t <= available)
    ]
    labels = unbalanced(counts)
    if not fitting:
        with pytest.raises(DataError, match="without images"):
            long_tailed_indices(labels, ratio, profile, order="size" if by_size else "index")
        return
    rows = long_tailed_indices(labels, ratio, profile, order="size" if by_size else "index")
    assert len(set(rows.tolist())) == len(rows)
    subset_counts = np.bincount(labels[rows], minlength=len(counts))
    assert subset_counts[list(order)].tolist() == fitting[-1].tolist()


def test_a_permutation_of_the_classes_decides_the_head():
    labels = balanced(4, 20)
    rows = long_tailed_indices(labels, 8, order=[2, 0, 3, 1])
    assert np.bincount(labels[rows]).tolist() == [10, 2, 20, 5]


@pytest.mark.parametrize("order", ["sise", [0, 1], [0, 1, 1, 2], [1, 2, 3, 4]], ids=str)
def test_a_bad_order_is_refused(order):
    with pytest.raises(SettingError, match="order of the classes"):
        long_tailed_indices(balanced(4, 20), 2, order=order)


def test_ratio_one_keeps_all_images_of_an_unbalanced_set():
    labels = unbalanced([5, 0, 3])
    assert sorted(long_tailed_indices(labels, 1)) == list(range(8))


def test_a_long_tail_needs_images_of_every_class():
    with pytest.raises(DataError, match="1 of 3 classes have no images"):
        long_tailed_indices(unbalanced([5, 0, 3]), 2)


@pytest.mark.parametrize("ratio", [0.5, float("nan"), float("inf")])
def test_a_subset_with_a_bad_ratio_is_refused(ratio):
    with pytest.raises(DataError, match="imbalance ratio"):
        long_tailed_indices(balanced(3, 10), ratio)


@pytest.mark.parametrize(
    "labels",
    [np.array([], np.int64), np.zeros((2, 2), np.int64), np.array([0.0, 1.0]), np.array([-1, 0])],
    ids=["empty", "matrix", "floats", "negative"],
)
def test_bad_labels_are_refused(labels):
    with pytest.raises(DataError, match="class numbers"):
        long_tailed_indices(labels, 2)


@pytest.mark.parametrize("index", [-1, 4])
def test_outside_refuses_indices_of_another_set(index):
    with pytest.raises(DataError, match="from 0 to 3"):
        outside(np.zeros(4, np.int64), np.array([index]))


def test_outside_of_nothing_is_everything():
    assert outside(np.zeros(3, np.int64), np.array([], np.int64)).tolist() == [0, 1, 2]
