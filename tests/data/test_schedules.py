"""Label distributions that change over a stream."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twoshift import priors
from twoshift.data.schedules import EXAMPLES, Schedule, named, schedules
from twoshift.errors import DataError, PriorError, SettingError

CLASSES = 10


def balanced(classes=CLASSES, each=1000):
    return np.random.default_rng(1).permutation(np.repeat(np.arange(classes), each))


def shares(labels, classes=CLASSES):
    return np.bincount(labels, minlength=classes) / len(labels)


def distance(labels, prior):
    return np.abs(shares(labels) - prior).sum()


def test_names():
    assert {name.partition("-")[0] for name in EXAMPLES} == set(schedules)
    for kind in schedules:
        schedule = named(f"{kind}-50", CLASSES)
        assert isinstance(schedule, Schedule)
        assert np.array_equal(schedule.first, priors.named("forward-50", CLASSES))
        assert np.array_equal(schedule.last, priors.named("backward-50", CLASSES))


@pytest.mark.parametrize("name", priors.EXAMPLES)
def test_distributions_that_stay_are_those_of_priors(name):
    order = [3, 1, 0, 2]
    expected = priors.named(name, 4, order=order, seed=5)
    assert np.array_equal(named(name, 4, order=order, seed=5), expected)


def test_the_frequent_classes_are_those_of_the_training():
    schedule = named("drift-10", 3, order=[2, 0, 1])
    assert schedule.first.argmax() == schedule.last.argmin() == 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("drfit-50", "unknown label distribution 'drfit-50'. Did you mean 'drift-50'"),
        ("swich-50", "Did you mean 'switch-50'"),
        ("drift", "Did you mean 'drift-50'"),
        ("switch-", "Did you mean 'switch-50'"),
        ("forwrd-50", "Did you mean 'forward-50'"),
        ("drift-fast", "'drift-fast': .* must be forward-NUMBER, got 'fast'"),
        ("drift-0.5", "'drift-0.5': imbalance ratio, must be at least 1"),
    ],
)
def test_what_is_no_label_distribution(name, says):
    with pytest.raises(PriorError, match=says):
        named(name, CLASSES)


@settings(deadline=None)
@given(
    st.sampled_from(["drift", "switch"]),
    st.integers(1, 100),
    st.lists(st.integers(4, 60), min_size=2, max_size=8),
    st.integers(0, 10**6),
    st.one_of(st.none(), st.integers(30, 200)),
)
def test_no_image_twice_and_the_same_seed_the_same_images(kind, ratio, sizes, seed, images):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    schedule = named(f"{kind}-{ratio}", len(sizes))
    rows = schedule.draw(labels, seed, images=images)
    assert rows.dtype == np.int64
    assert len(set(rows.tolist())) == len(rows) > 0
    assert len(rows) <= (images or len(labels))
    assert np.array_equal(rows, schedule.draw(labels, seed, images=images))


@pytest.mark.parametrize("kind", ["drift", "switch"])
def test_the_stream_is_as_long_as_the_images_allow(kind):
    labels = balanced()
    schedule = named(f"{kind}-50", CLASSES)
    drawn = np.bincount(labels[schedule.draw(labels, seed=0)])
    # the most frequent class of either end is the rarest of the other: 981 + 981 / 50
    assert drawn.max() == 1000
    np.testing.assert_allclose(shares(labels[schedule.draw(labels, 0)]), schedule.mean, atol=0.001)
    few = schedule.draw(labels, seed=0, images=1000)
    assert 990 < len(few) <= 1000
    np.testing.assert_allclose(shares(labels[few]), schedule.mean, atol=0.005)


def test_a_drift_goes_from_one_distribution_to_the_other():
    labels, schedule = balanced(), named("drift-50", CLASSES)
    streams = [np.array_split(labels[schedule.draw(labels, seed)], 10) for seed in range(20)]
    for i in range(10):  # the mixture at the middle of every tenth
        late = (i + 0.5) / 10
        expected = (1 - late) * schedule.first + late * schedule.last
        tenths = np.concatenate([stream[i] for stream in streams])
        assert distance(tenths, expected) < 0.06
    for stream in streams:
        assert distance(stream[0], schedule.first) < 0.3
        assert distance(stream[-1], schedule.last) < 0.3


@pytest.mark.parametrize("seed", range(3))
def test_a_switch_has_two_halves_of_shuffled_images(seed):
    labels, schedule = balanced(), named("switch-50", CLASSES)
    rows = schedule.draw(labels, seed)
    first, last = np.split(rows, 2)
    assert set(first).isdisjoint(last)
    assert distance(labels[first], schedule.first) < 0.01
    assert distance(labels[last], schedule.last) < 0.01
    for half, prior in ((first, schedule.first), (last, schedule.last)):
        early, late = np.array_split(labels[half], 2)
        assert distance(early, prior) < 0.1
        assert distance(late, prior) < 0.1


def test_the_pool_is_that_of_either_half():
    labels = balanced()
    drawn = labels[named("switch-10", CLASSES).draw(labels, 0, pool=100)]
    first, last = np.split(drawn, 2)
    assert np.bincount(first)[0] == np.bincount(last)[-1] == 100
    assert np.bincount(first)[-1] == np.bincount(last)[0] == 10


def test_what_cannot_be_drawn():
    schedule, labels = named("drift-2", 3), np.repeat(np.arange(3), 10)
    with pytest.raises(DataError, match="class 0: 15 images needed, 10 available"):
        schedule.draw(labels, 0, pool=10)
    with pytest.raises(SettingError, match="pool, must be at least 1"):
        schedule.draw(labels, 0, pool=0)
    with pytest.raises(DataError, match="class 1: images needed, 0 available"):
        schedule.draw(np.array([0, 0, 2, 2]), 0)
    with pytest.raises(DataError, match="enough for both distributions"):
        named("drift-1", 3).draw(np.arange(3), 0)
    with pytest.raises(SettingError, match="images of a stream, must be at least 2"):
        schedule.draw(labels, 0, images=1)
