"""Other estimates of accuracy: against slow versions, exact posteriors, and orders of classes."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accuracy.test_expected import posteriors
from twoshift.accuracy import others
from twoshift.errors import BatchError, PriorError

PRIORS = ([0.2] * 5, [0.6, 0.2, 0.1, 0.06, 0.04], [0.01, 0.01, 0.01, 0.01, 0.96])


def predictions(images, classes, seed=0, sharpness=0.3):
    return np.random.default_rng(seed).dirichlet(np.full(classes, sharpness), images)


def test_confidences_image_by_image():
    p = predictions(40, 4)
    largest = [max(row) for row in p]
    mean = math.fsum(largest) / 40
    assert others.mean_confidence(p) == pytest.approx(mean)
    assert others.mean_confidence(torch.from_numpy(p)) == pytest.approx(mean)
    assert others.difference_of_confidences(p, 0.5, 0.6) == pytest.approx(mean - 0.1)
    assert others.difference_of_confidences(p, 0.9, 0.1) == 1  # mean + 0.8 is above
    assert others.difference_of_confidences(p, 0.0, 1.0) == 0
    above = sum(value > 0.7 for value in largest) / 40
    assert 0 < above < 1
    assert others.thresholded_confidence(p, 0.7) == above


@pytest.mark.parametrize("accuracy", [0.0, 0.25, 0.6, 1.0])
def test_as_many_source_images_are_above_the_threshold_as_are_right(accuracy):
    p = predictions(1000, 4)
    threshold = others.confidence_threshold(p, accuracy)
    assert others.thresholded_confidence(p, threshold) == pytest.approx(accuracy, abs=0.0015)


@pytest.mark.parametrize("seed", range(5))
def test_transport_tries_every_way_to_give_out_labels(seed):
    p, counts = predictions(6, 3, seed), [3, 2, 1]
    labels = [c for c, count in enumerate(counts) for _ in range(count)]
    best = max(
        sum(p[i, c] for i, c in enumerate(given)) / 6 for given in itertools.permutations(labels)
    )
    assert others.transport(p, np.array(counts) / 6) == pytest.approx(best)


def test_transport_is_half_the_distance_that_earth_is_moved():
    """Two heaps, so that what is moved where has one unknown."""
    p = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    moved = np.abs(p[:, None] - np.eye(2)).sum(2)  # L1 distance to each one-hot vector
    plans = [np.array(to) for to in itertools.product((0, 1), repeat=3) if sum(to) == 2]
    least = min(moved[range(3), to].mean() for to in plans)
    assert others.transport(p, [1 / 3, 2 / 3]) == pytest.approx(1 - least / 2)


def test_shares_between_images_are_split():
    p = np.array([[0.9, 0.1], [0.6, 0.4]])
    # a quarter of all is class 1: half of the second image
    assert others.transport(p, [0.75, 0.25]) == pytest.approx(0.9 / 2 + (0.6 + 0.4) / 4)


@pytest.mark.parametrize("shape", [(7, 3), (3, 7)])
def test_nuclear_norm_by_eigenvalues(shape):
    p = predictions(*shape)
    values = np.linalg.eigvalsh(p.T @ p)
    total = np.sqrt(np.maximum(values, 0)).sum()
    assert others.nuclear_norm(p) == pytest.approx(total / math.sqrt(min(shape) * shape[0]))


def test_nuclear_norm_of_sure_predictions():
    assert others.nuclear_norm(np.eye(4)[[0, 1, 2, 3] * 5]) == pytest.approx(1)
    assert others.nuclear_norm(np.eye(4)[[0] * 20]) == pytest.approx(0.5)


def test_disagreement_pass_by_pass():
    p, dropped = predictions(30, 4), np.stack([predictions(30, 4, seed) for seed in (1, 2, 3)])
    dropped = 0.6 * p + 0.4 * dropped
    changed = mean = 0
    for q in dropped:
        for before, after in zip(p, q, strict=True):
            changed += int(before.argmax() != after.argmax())
            mean = mean + after
    mean = mean / 90
    entropy = -sum(m * math.log(m) for m in mean)
    error = changed / 90 / (entropy / math.log(4)) ** 3
    assert 0 < error < 1
    assert others.dropout_disagreement(p, dropped) == pytest.approx(1 - error)


def test_disagreement_of_one_class_counts_as_wrong():
    p = np.eye(3)[[0] * 10]
    assert others.dropout_disagreement(p, p[None]) == 1
    dropped = np.tile([0.98, 0.01, 0.01], (1, 10, 1))
    dropped[0, 0] = [0.4, 0.5, 0.1]  # one in ten
    assert others.dropout_disagreement(p, dropped) == 0


def test_dropout_keeps_the_mean_and_drops_the_rate():
    features = torch.ones(50, 400)
    seen = []

    def head(h):
        seen.append(h)
        return h[:, :2]

    passes = others.dropout_passes(features, head, torch.Generator().manual_seed(0), 3, 0.4)
    assert passes.shape == (3, 50, 2)
    torch.testing.assert_close(passes.sum(2), torch.ones(3, 50))
    h = torch.stack(seen)
    assert h.unique().tolist() == pytest.approx([0, 1 / 0.6])
    assert (h == 0).float().mean() == pytest.approx(0.4, abs=0.01)
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("prior", PRIORS)
def test_exact_posteriors(prior):
    probs, y = posteriors(prior, images=512)
    truth = float((probs.argmax(1) == y).float().mean())
    assert others.mean_confidence(probs) == pytest.approx(truth, abs=0.03)
    assert others.transport(probs, prior) == pytest.approx(truth, abs=0.05)


def test_the_wrong_labels_mislead_transport():
    probs, y = posteriors(PRIORS[2], images=512)
    truth = float((probs.argmax(1) == y).float().mean())
    assert others.transport(probs, PRIORS[0]) < truth - 0.3


ESTIMATES = {
    "confidence": lambda p, prior: others.mean_confidence(p),
    "difference": lambda p, prior: others.difference_of_confidences(p, 0.8, 0.9),
    "threshold": lambda p, prior: others.thresholded_confidence(p, 0.6),
    "transport": others.transport,
    "norm": lambda p, prior: others.nuclear_norm(p),
    "disagreement": lambda p, prior: others.dropout_disagreement(
        p, 0.8 * p[None] + 0.2 * np.roll(p, 1, 0)
    ),
}


@pytest.mark.parametrize("name", ESTIMATES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), order=st.permutations(range(4)))
def test_the_order_of_classes_does_not_matter(name, seed, order):
    p, prior = predictions(20, 4, seed), predictions(1, 4, seed + 1000, 1.0)[0]
    estimate = ESTIMATES[name]
    assert estimate(p[:, order], prior[order]) == pytest.approx(estimate(p, prior), abs=1e-9)


@pytest.mark.parametrize(
    "probs", [np.zeros((0, 3)), np.ones(3), np.full((2, 3), 0.5), np.full((2, 3), np.nan)]
)
def test_what_is_no_window_of_probabilities_is_refused(probs):
    with pytest.raises(BatchError, match="predicted probabilities"):
        others.mean_confidence(probs)


def test_labels_and_passes_must_fit():
    p = predictions(5, 3)
    with pytest.raises(PriorError, match="length 3"):
        others.transport(p, [0.5, 0.5])
    with pytest.raises(BatchError, match=r"\(passes, 5, 3\)"):
        others.dropout_disagreement(p, p)
