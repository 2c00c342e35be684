"""The mathematics of alarms, against sums that are written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoshift.errors import BatchError, SettingError
from twoshift.watch.evidence import BETS, Evidence


def written_out(batches, bounds):
    """M_t and the best beginning, by the double sum of the module's docstring."""
    parts = {}
    for bet in BETS:
        for begin in range(len(batches)):
            capital = 1 / (len(BETS) * (begin + 1) * (begin + 2))
            for batch, m in zip(batches[begin:], bounds[begin:], strict=True):
                for x in batch:
                    capital *= 1 + bet / m * (x - m)
            parts[bet, begin] = capital
    best = max(parts, key=lambda part: parts[part])[1]
    return sum(parts.values()), sum(map(len, batches[:best]))


values = st.lists(st.floats(0, 1), min_size=1, max_size=5)


@given(st.lists(st.tuples(values, st.floats(0.05, 0.95)), min_size=1, max_size=7))
def test_it_is_the_sum_over_bets_and_beginnings(stream):
    batches, bounds = zip(*stream, strict=True)
    evidence = Evidence()
    for batch, bound in stream:
        evidence.add(batch, bound)
    expected, _ = written_out(batches, bounds)
    assert math.exp(evidence.log_capital) == pytest.approx(expected, rel=1e-9)
    assert evidence.observed == sum(map(len, batches))


def test_it_tells_when_the_change_came():
    rng, evidence = np.random.default_rng(0), Evidence()
    stream = [rng.random(16) < p for p in [0.2] * 40 + [0.9] * 4]
    for batch in stream:
        evidence.add(batch, 0.4)
    assert evidence.log_capital > math.log(1000)
    assert evidence.since == written_out(stream, [0.4] * 44)[1]
    assert abs(evidence.since - 40 * 16) <= 32


@pytest.mark.parametrize("size", [1, 7])
def test_false_evidence_is_rare_at_the_bound_itself(size):
    """Ville's inequality, in the worst case: the mean is exactly the bound, all the time."""
    rng, reached, alpha = np.random.default_rng(size), 0, 0.05
    for _ in range(300):
        evidence = Evidence()
        for batch in (rng.random((60, size)) < 0.3).astype(float):
            evidence.add(batch, 0.3)
            if evidence.log_capital >= math.log(1 / alpha):
                reached += 1
                break
    assert reached / 300 <= alpha


def test_on_average_nothing_is_gained():
    """The expected capital after two batches, over every outcome, is the sum of the shares."""
    m, mean = 0.3, 0.0
    for bits in np.ndindex(2, 2, 2, 2):
        evidence = Evidence()
        evidence.add(np.array(bits[:2], float), m)
        evidence.add(np.array(bits[2:], float), m)
        chance = np.prod([m if bit else 1 - m for bit in bits])
        mean += chance * math.exp(evidence.log_capital)
    assert mean == pytest.approx(1 / 2 + 1 / 6)


def test_a_state_goes_on_and_a_restart_forgets():
    first, second = Evidence(), Evidence()
    first.add([0.9, 0.2], 0.5)
    second.load(first.state())
    for evidence in (first, second):
        evidence.add([1.0], 0.5)
    assert first.log_capital == second.log_capital
    first.restart()
    assert (first.log_capital, first.observed) == (-math.inf, 0)
    first.add([], 0.5)  # nothing to see
    assert first.observed == 0


@pytest.mark.parametrize("wrong", [[1.5], [-0.1], [float("nan")], [[0.5]]])
def test_observations_out_of_range_are_refused(wrong):
    with pytest.raises(BatchError, match="from 0 to 1"):
        Evidence().add(wrong, 0.5)
    with pytest.raises(SettingError, match="bound of evidence"):
        Evidence().add([0.5], 0.0)


def test_a_state_of_another_kind_is_refused():
    state = Evidence().state()
    with pytest.raises(BatchError, match="rows of 6 numbers"):
        Evidence().load({**state, "best": np.zeros(2)})
