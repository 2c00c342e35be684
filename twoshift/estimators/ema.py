"""Moving average of the predictions: the estimate that label shift adapters were proposed with."""

from __future__ import annotations

import torch
from torch import Tensor

from twoshift.errors import SettingError
from twoshift.estimators.base import PriorEstimator, State, estimators
from twoshift.registry import check_numbers


@estimators.register("ema")
class EMA(PriorEstimator):
    """Exponential moving average of the predicted probabilities, from a uniform start.

    Y_t = alpha * mean + (1 - alpha) * Y_{t-1}.

    Args:
        classes: Number of classes.
        alpha: Weight of the newest batch.
        top_k: Count only the k largest probabilities of each sample, renormalised.
        bias_correction: Remove the remainder of the uniform start.
    """

    def __init__(
        self,
        classes: int,
        alpha: float = 0.1,
        top_k: int | None = None,
        bias_correction: bool = False,
    ) -> None:
        super().__init__(classes)
        check_numbers("ema", "above 0, at most 1", alpha=alpha)
        if top_k is not None and not 1 <= top_k <= classes:
            raise SettingError("top_k of ema", must_be=f"1 to {classes}", got=top_k)
        self.alpha, self.top_k, self.bias_correction = alpha, top_k, bias_correction
        self.reset()

    def start(self) -> State:
        """Nothing averaged yet."""
        return {"seen": torch.zeros(self.classes), "weight": torch.zeros(())}

    def problem(self, state: State) -> str | None:
        """Shares below zero, or a weight that is none."""
        fits = (state["seen"] >= 0).all() and 0 <= state["weight"] <= 1.001  # it is rounded
        return None if fits else "one with shares of at least 0 and a weight from 0 to 1"

    def step(self, state: State, probs: Tensor) -> State:
        """Move towards the mean prediction of the batch."""
        mean = probs.mean(0) if self.top_k is None else keep_top(probs, self.top_k).mean(0)
        return {
            "seen": self.alpha * mean + (1 - self.alpha) * state["seen"],
            "weight": self.alpha + (1 - self.alpha) * state["weight"],
        }

    def read(self, state: State) -> Tensor:
        """The average, with the rest of the weight on the uniform start, or rescaled without it."""
        average, weight = state["seen"], state["weight"]
        # kept apart from the start, so that no class can become negative by cancellation
        if self.bias_correction and weight > 0:
            return average / weight
        return average + (1 - weight) / self.classes


def keep_top(probs: Tensor, k: int) -> Tensor:
    """Zero all but the k largest entries of each row, and renormalise."""
    values, places = probs.topk(k, dim=1)
    return torch.zeros_like(probs).scatter(1, places, values / values.sum(1, keepdim=True))
