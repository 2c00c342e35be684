import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoshift import priors
from twoshift.errors import PriorError

CLASSES = st.integers(1, 60)
RATIOS = st.floats(1, 1000)


@st.composite
def distributions(draw, positive=False):
    low = 0.01 if positive else 0.0
    weights = draw(
        st.lists(st.floats(low, 1), min_size=1, max_size=30).filter(lambda w: sum(w) > 0.1)
    )
    return np.array(weights) / sum(weights)


@st.composite
def orders(draw, classes):
    return draw(st.permutations(range(classes)))


NAMES = st.one_of(
    st.just("uniform"),
    st.builds("{}-{}".format, st.sampled_from(["forward", "backward", "permuted"]), RATIOS),
    st.builds("dirichlet-{}".format, st.floats(0.05, 100)),
)


@given(NAMES, CLASSES, st.integers(0, 2**31), st.data())
def test_every_named_prior_is_a_distribution(name, classes, seed, data):
    order = data.draw(orders(classes))
    p = priors.named(name, classes, order=order, seed=seed)
    assert p.shape == (classes,)
    assert p.dtype == np.float64
    assert (p >= 0).all()
    assert math.isclose(math.fsum(p), 1, abs_tol=1e-9)
    assert np.array_equal(p, priors.named(name, classes, order=order, seed=seed))


@given(distributions(), st.data())
def test_reverse_is_an_involution_that_only_moves_shares(p, data):
    order = data.draw(orders(len(p)))
    flipped = priors.reverse(p, order)
    assert sorted(flipped) == sorted(p)
    assert np.array_equal(priors.reverse(flipped, order), p)
    assert np.array_equal(priors.reverse(priors.reverse(p)), p)


@given(distributions())
def test_reverse_without_an_order_reads_backwards(p):
    assert priors.reverse(p).tolist() == p.tolist()[::-1]


@given(st.integers(2, 60), RATIOS, st.data())
def test_backward_is_forward_with_the_ranks_turned_round(classes, ratio, data):
    order = data.draw(orders(classes))
    forward = priors.named(f"forward-{ratio}", classes, order=order)
    backward = priors.named(f"backward-{ratio}", classes, order=order)
    for rank, c in enumerate(order):
        assert backward[c] == forward[order[classes - 1 - rank]]
    assert (np.diff(forward[list(order)]) <= 0).all()
    assert (np.diff(backward[list(order)]) >= 0).all()


@given(st.integers(2, 100), RATIOS)
def test_longtail_has_the_ratio_and_a_constant_decay(classes, ratio):
    p = priors.longtail(classes, ratio)
    assert math.isclose(p[0] / p[-1], ratio, rel_tol=1e-9)
    expected = [ratio ** (-i / (classes - 1)) for i in range(classes)]
    np.testing.assert_allclose(p, np.array(expected) / math.fsum(expected), rtol=1e-9)


@given(st.integers(2, 60), RATIOS, st.integers(0, 1000))
def test_permuted_is_the_long_tail_in_another_order(classes, ratio, seed):
    p = priors.named(f"permuted-{ratio}", classes, seed=seed)
    assert sorted(p) == sorted(priors.longtail(classes, ratio))


def test_the_seed_moves_only_random_priors():
    for name in ("permuted-50", "dirichlet-0.1"):
        assert not np.array_equal(priors.named(name, 20, seed=0), priors.named(name, 20, seed=1))
    for name in ("uniform", "forward-50", "backward-50"):
        assert np.array_equal(priors.named(name, 20, seed=0), priors.named(name, 20, seed=1))


def test_a_single_class_has_it_all():
    for name in ("uniform", "forward-50", "backward-50", "permuted-50", "dirichlet-0.1"):
        assert priors.named(name, 1).tolist() == [1.0]


@given(distributions(positive=True), st.floats(-3, 3), st.floats(-3, 3))
def test_powers_compose(p, a, b):
    np.testing.assert_allclose(
        priors.power(priors.power(p, a), b), priors.power(p, a * b), rtol=1e-7, atol=1e-12
    )


@given(distributions(positive=True), st.floats(-3, 3))
def test_power_by_the_formula(p, exponent):
    raw = [x**exponent for x in p]
    np.testing.assert_allclose(priors.power(p, exponent), np.array(raw) / math.fsum(raw), rtol=1e-9)


@given(distributions())
def test_power_one_keeps_and_zero_levels(p):
    np.testing.assert_allclose(priors.power(p, 1), p, atol=1e-12)
    np.testing.assert_allclose(priors.power(p, 0), priors.uniform(len(p)))


def test_power_minus_one_turns_the_long_tail_round():
    p = priors.longtail(10, 100)
    np.testing.assert_allclose(priors.power(p, -1), priors.reverse(p), rtol=1e-9)


def test_power_leaves_zero_at_zero_and_refuses_its_inverse():
    p = np.array([0.5, 0.5, 0.0])
    assert priors.power(p, 2).tolist() == [0.5, 0.5, 0.0]
    with pytest.raises(PriorError, match="no inverse"):
        priors.power(p, -1)


def test_dirichlet_concentration_decides_how_even_it_is():
    rng = np.random.default_rng(0)
    sharp = np.mean([priors.dirichlet(10, 0.05, rng).max() for _ in range(200)])
    even = np.mean([priors.dirichlet(10, 100.0, rng).max() for _ in range(200)])
    assert sharp > 0.7
    assert even < 0.2


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30).filter(any))
def test_from_counts(counts):
    assert priors.from_counts(counts).tolist() == pytest.approx([c / sum(counts) for c in counts])


@pytest.mark.parametrize("counts", [[], [0, 0], [3, -1], [[1, 2]]])
def test_from_counts_refuses(counts):
    with pytest.raises(PriorError, match="class counts"):
        priors.from_counts(counts)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_class_order_is_stable_from_many_to_few(counts):
    expected = sorted(range(len(counts)), key=lambda c: (-counts[c], c))
    assert priors.class_order(counts).tolist() == expected


@given(distributions())
def test_check_prior_takes_distributions_of_any_kind(p):
    for kind in (p, p.tolist(), tuple(p), p.astype(np.float32)):
        checked = priors.check_prior(kind, len(p))
        assert checked.dtype == np.float64
        assert math.isclose(math.fsum(checked), 1, abs_tol=1e-12)
        np.testing.assert_allclose(checked, p, atol=1e-6)


def test_check_prior_does_not_change_what_it_is_given():
    p = np.array([0.50004, 0.5])
    priors.check_prior(p)
    assert p.tolist() == [0.50004, 0.5]


@pytest.mark.parametrize(
    ("prior", "says"),
    [
        ([0.5, 0.4], "sum 0.9.*Divide by it"),
        ([50.0, 50.0], "sum 100"),
        ([1.5, -0.5], "non-negative, got -0.5 for class 1"),
        ([math.nan, 1.0], "finite, got nan"),
        ([math.inf, 1.0], "finite, got inf"),
        ([[0.5, 0.5]], r"a vector, got shape \(1, 2\)"),
        ([], "a vector"),
        (0.5, "a vector"),
        (None, "vector"),
        ("uniform", "numbers"),
        ([[0.5], [0.25, 0.25]], "numbers"),
        ({"a": 1}, "numbers"),
    ],
)
def test_check_prior_refuses(prior, says):
    with pytest.raises(PriorError, match=says):
        priors.check_prior(prior)


def test_check_prior_names_whose_it_is_and_the_length():
    with pytest.raises(PriorError, match=r"my prior, must be of length 3.*got length 2"):
        priors.check_prior([0.5, 0.5], 3, "my prior")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("forwards-50", "Did you mean 'forward-50'"),
        ("forward", "unknown label distribution"),
        ("uniform-3", "unknown label distribution"),
        ("forward-many", "must be forward-NUMBER"),
        ("forward-0.5", "at least 1"),
        ("permuted-nan", "at least 1"),
        ("dirichlet-0", "positive"),
        ("dirichlet--1", "positive"),
        ("dirichlet-nan", "positive"),
        ("", "unknown"),
    ],
)
def test_named_refuses(name, says):
    with pytest.raises(PriorError, match=says):
        priors.named(name, 10)


@given(distributions(positive=True), st.integers(0, 2**31))
def test_label_distributions_from_anywhere(source, seed):
    p = priors.anywhere(source, np.random.default_rng(seed))
    assert p.shape == source.shape
    assert (p >= 0).all()
    assert p.sum() == pytest.approx(1)


def test_anywhere_draws_tilts_permutations_and_few_classes():
    source, rng = priors.longtail(10, 100), np.random.default_rng(0)
    drawn = [priors.anywhere(source, rng) for _ in range(300)]

    def along(p):
        """Correlation of log shares with the source's: 1 or -1 for a tilt."""
        return abs(np.corrcoef(np.log(p + 1e-12), np.log(source))[0, 1])

    tilts = [p for p in drawn if along(p) > 1 - 1e-6]
    assert 60 < len(tilts) < 140
    assert min(p[0] for p in tilts) < 0.01 < 0.5 < max(p[0] for p in tilts)
    same = [p for p in drawn if along(p) <= 1 - 1e-6 and along(np.sort(p)[::-1]) > 1 - 1e-6]
    assert 60 < len(same) < 140
    assert any(p.max() > 0.9 for p in drawn)
