"""What logits contain, against classifiers for which it is known, and a slow likelihood."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twoshift import priors
from twoshift.calibration.evidence import (
    TRAINING,
    UNIFORM,
    looks_trained_on,
    nearly_equal,
    read_prior,
)
from twoshift.estimators._bcts import fit_bcts

CLASSES = 5


def gaussians(shares, images=2000, seed=0, overlap=1.0):
    """Labels, and log-likelihoods under every class: the logits of a perfect, fair classifier."""
    rng = np.random.default_rng(seed)
    y = np.concatenate([np.arange(CLASSES), rng.choice(CLASSES, images - CLASSES, p=shares)])
    centres = rng.normal(size=(CLASSES, 3)) * 1.5
    x = centres[y] + overlap * rng.normal(size=(images, 3))
    distances = ((x[:, None] - centres) ** 2).sum(2)
    return torch.from_numpy(-distances / (2 * overlap**2)), torch.from_numpy(y)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("contains", [TRAINING, UNIFORM])
@pytest.mark.parametrize("same_labels", [True, False])
def test_what_is_known_is_found(temperature, contains, same_labels):
    trained_on = priors.longtail(CLASSES, 30)
    z, y = gaussians(trained_on if same_labels else np.full(CLASSES, 0.2))
    if contains == TRAINING:
        z = z + torch.from_numpy(np.log(trained_on))
    reading = read_prior(z * temperature, y, trained_on)
    assert reading.contains == contains
    assert reading.sure


@settings(max_examples=25)
@given(ratio=st.floats(5, 200), seed=st.integers(0, 1000), contains=st.booleans())
def test_it_is_never_sure_of_the_wrong_answer(ratio, seed, contains):
    trained_on = priors.longtail(CLASSES, ratio)
    z, y = gaussians(trained_on, 400, seed)
    z = z + torch.from_numpy(np.log(trained_on)) if contains else z
    reading = read_prior(z, y, trained_on)
    assert (reading.contains == TRAINING) == contains or not reading.sure


def test_likelihoods_against_a_slow_search():
    trained_on = priors.longtail(CLASSES, 10)
    z, y = gaussians(trained_on, 60, seed=3)
    reading = read_prior(z, y, trained_on)

    def slow(offset):
        best = math.inf
        for slope in np.geomspace(0.05, 20, 400):
            total = 0.0
            for row, label in zip(z.tolist(), y.tolist(), strict=True):
                scores = [slope * s + o for s, o in zip(row, offset, strict=True)]
                total -= scores[label] - math.log(sum(math.exp(s) for s in scores))
            best = min(best, total / len(y))
        return best

    log_q = np.log(np.bincount(y, minlength=CLASSES) / len(y))
    assert reading.uniform == pytest.approx(slow(log_q), abs=1e-4)
    assert reading.training == pytest.approx(slow(log_q - np.log(trained_on)), abs=1e-4)


def test_images_that_were_learnt_by_heart_still_tell():
    trained_on = priors.longtail(CLASSES, 50)
    for contained in (TRAINING, UNIFORM):
        z, y = gaussians(trained_on, overlap=0.12)
        z = z / 10 + torch.from_numpy(np.log(trained_on)) * (contained == TRAINING)
        assert trained_on_them(z, y)
        assert read_prior(z, y, trained_on).contains == contained


def trained_on_them(z, y):
    return looks_trained_on(z, y, *fit_bcts(z, y))


def test_who_looks_trained_on():
    trained_on = priors.longtail(CLASSES, 10)
    z, y = gaussians(trained_on)
    assert not trained_on_them(z, y)  # as right as it is sure
    assert not trained_on_them(3 * z, y)  # too sure
    assert trained_on_them(z / 2, y)  # more often right than sure
    sharp, y = gaussians(trained_on, overlap=0.1)
    assert trained_on_them(sharp, y)  # always right, and sure
    few, y = gaussians(trained_on, images=12)
    assert not trained_on_them(few / 1.2, y)  # too few to tell


@pytest.mark.parametrize(
    ("counts", "equal"),
    [
        ([100, 100, 100], True),
        ([100, 110, 95], True),
        ([8, 14, 11, 9, 12], True),  # the luck of a draw
        ([1000, 800, 700], False),
        ([500, 50, 5], False),
    ],
)
def test_equally_frequent_labels(counts, equal):
    assert nearly_equal(np.array(counts)) == equal
