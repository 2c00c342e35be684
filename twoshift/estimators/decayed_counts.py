"""Decayed counts: a moving average without its faults."""

from __future__ import annotations

import torch
from torch import Tensor

from twoshift.estimators.base import PriorEstimator, State, estimators
from twoshift.registry import check_numbers


@estimators.register("decayed_counts")
class DecayedCounts(PriorEstimator):
    """Soft counts of the predicted classes; the older an image, the less it counts.

    What `ema` lacks: nothing of a uniform start remains, every image counts the same whatever the
    size of its batch, and a Dirichlet prior keeps every class above zero.

    Args:
        classes: Number of classes.
        half_life: Images after which a prediction counts half; 421 is the paper's 0.1 per batch of
            64.
        pseudo_count: Images of every class to add: the Dirichlet prior.
    """

    def __init__(self, classes: int, half_life: float = 421.0, pseudo_count: float = 1.0) -> None:
        super().__init__(classes)
        counts = {"half_life": half_life, "pseudo_count": pseudo_count}
        check_numbers("decayed_counts", "above 0 and finite", **counts)
        self.half_life, self.pseudo_count = half_life, pseudo_count
        self.reset()

    def start(self) -> State:
        """No counts."""
        return {"counts": torch.zeros(self.classes)}

    def problem(self, state: State) -> str | None:
        """Counts below zero."""
        return "one with counts of at least 0" if (state["counts"] < 0).any() else None

    def step(self, state: State, probs: Tensor) -> State:
        """Decay the old counts and add those of the batch."""
        decay = 0.5 ** (len(probs) / self.half_life)
        return {"counts": decay * state["counts"] + probs.sum(0)}

    def read(self, state: State) -> Tensor:
        """Mean of the Dirichlet posterior."""
        counts = state["counts"] + self.pseudo_count
        return counts / counts.sum()
