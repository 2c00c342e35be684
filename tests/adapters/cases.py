"""One adapter of each kind, far from the identity if it can be, for a network of the toys."""

import torch

from tests.toys import CLASSES, randomise
from twoshift.adapters import adapters
from twoshift.models.head import find_head

COUNTS = [40.0, 30.0, 15.0, 10.0, 5.0]
SHARES = [0.4, 0.3, 0.15, 0.1, 0.05]
SETTINGS = {
    "calibrated": {"assumes": SHARES, "temperature": 1.7},
    "classwise": {"class_counts": COUNTS, "assumes": SHARES, "hidden": 7},
    "identity": {"class_counts": COUNTS},
    "label_shift": {"class_counts": COUNTS, "hidden": 7},
    "logit": {"assumes": SHARES},
}
NAMES = sorted(SETTINGS)


def make(name, net):
    """The adapter called ``name`` for the head of ``net``, with random weights if it has any."""
    with torch.random.fork_rng():  # a new linear layer draws from the global generator
        adapter = adapters.create(name, find_head(net)[1].in_features, CLASSES, **SETTINGS[name])
    return randomise(adapter)
