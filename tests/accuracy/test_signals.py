"""Signals of predictions against loops over single images."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twoshift.accuracy import read_signals, signal_count, signals_of


def draw(images, classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(images, classes, generator=generator)).softmax(1)


def by_hand(probs, threshold):
    """Confidence, entropy, share of sure images, and diversity, image by image."""
    rows, classes = probs.double().tolist(), probs.shape[1]
    largest = math.log(classes)

    def entropy(row):
        return -sum(p * math.log(p) for p in row if p > 0) / largest

    mean = [sum(row[c] for row in rows) / len(rows) for c in range(classes)]
    confidences = [max(row) for row in rows]
    return [
        sum(confidences) / len(rows),
        sum(map(entropy, rows)) / len(rows),
        sum(c > threshold for c in confidences) / len(rows),
        entropy(mean),
    ]


@given(st.integers(1, 40), st.integers(2, 12), st.floats(0, 1), st.integers(0, 99))
def test_signals_are_means_over_images(images, classes, threshold, seed):
    probs = draw(images, classes, seed)
    found = read_signals(signals_of(probs, threshold))
    assert found.tolist() == pytest.approx(by_hand(probs, threshold), abs=1e-9)
    assert ((found > -1e-9) & (found < 1 + 1e-6)).all()


def test_batches_add_up():
    probs = draw(50, 5)
    parts = sum(signals_of(part, 0.6) for part in probs.split([1, 7, 30, 12]))
    torch.testing.assert_close(parts, signals_of(probs, 0.6))
    assert parts.shape == (signal_count(5),)


def test_diversity_is_that_of_the_mean_prediction():
    different, same = torch.eye(4), torch.eye(4)[[0, 0, 0, 0]]
    for probs, diversity in ((different, 1.0), (same, 0.0)):
        confidence, entropy, sure, found = read_signals(signals_of(probs, 0.9)).tolist()
        assert (confidence, entropy, sure, found) == pytest.approx((1, 0, 1, diversity))
    confidence, entropy, *_ = read_signals(signals_of(torch.full((3, 4), 0.25))).tolist()
    assert (confidence, entropy) == pytest.approx((0.25, 1))


def test_no_images_give_zeros():
    sums = torch.stack([torch.zeros(signal_count(3)), signals_of(draw(5, 3)).float()])
    empty, other = read_signals(sums)
    assert empty.tolist() == [0, 0, 0, 0]
    assert other[0] > 0.3


def test_a_single_class_is_no_division_by_zero():
    assert read_signals(signals_of(torch.ones(4, 1), 0.5)).tolist() == [1, 0, 1, 0]


def test_the_order_of_classes_does_not_matter():
    probs, order = draw(30, 6), torch.tensor([4, 2, 0, 5, 1, 3])
    one, other = (read_signals(signals_of(p, 0.7)) for p in (probs, probs[:, order]))
    torch.testing.assert_close(one, other)
