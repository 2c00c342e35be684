"""Moving average of the predictions: the label estimate of label shift adapters."""

from __future__ import annotations

import torch
from torch import Tensor

from twoshift.errors import SettingError
from twoshift.estimators.base import PriorEstimator, State, estimators


@estimators.register("ema")
class EMA(PriorEstimator):
    """Exponential moving average of the predicted probabilities, from a uniform start.

    Y_t = alpha * mean + (1 - alpha) * Y_{t-1}.

    Args:
        classes: Number of classes.
        alpha: Weight of the newest batch.
        top_k: Count only the k largest probabilities of each sample, renormalised.
        bias_correction: Remove what is left of the uniform start.
    """

    def __init__(
        self,
        classes: int,
        alpha: float = 0.1,
        top_k: int | None = None,
        bias_correction: bool = False,
    ) -> None:
        super().__init__(classes)
        if not 0 < alpha <= 1:
            raise SettingError("alpha of ema", must_be="above 0, at most 1", got=alpha)
        if top_k is not None and not 1 <= top_k <= classes:
            raise SettingError("top_k of ema", must_be=f"1 to {classes}", got=top_k)
        self.alpha, self.top_k, self.bias_correction = alpha, top_k, bias_correction
        self.reset()

    def start(self) -> State:
        """No batch seen."""
        return {"seen": torch.zeros(self.classes), "weight": torch.zeros(())}

    def step(self, state: State, probs: Tensor) -> State:
        """Move towards the mean prediction of the batch."""
        mean = probs.mean(0) if self.top_k is None else keep_top(probs, self.top_k).mean(0)
        return {
            "seen": self.alpha * mean + (1 - self.alpha) * state["seen"],
            "weight": self.alpha + (1 - self.alpha) * state["weight"],
        }

    def read(self, state: State) -> Tensor:
        """What was seen, filled up with the uniform start or scaled up instead of it."""
        seen, weight = state["seen"], state["weight"]
        # apart from the start, the correction cannot turn a class negative by cancellation
        if self.bias_correction and weight > 0:
            return seen / weight
        return seen + (1 - weight) / self.classes


def keep_top(probs: Tensor, k: int) -> Tensor:
    """Zero all but the k largest entries of each row, and renormalise."""
    values, places = probs.topk(k, dim=1)
    return torch.zeros_like(probs).scatter(1, places, values / values.sum(1, keepdim=True))
