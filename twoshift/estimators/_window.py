"""Estimators that keep the last predictions and solve for the prior behind them."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from twoshift.errors import SettingError
from twoshift.estimators._bcts import scaled
from twoshift.estimators.base import PriorEstimator, State

Array = NDArray[np.float64]


class Windowed(PriorEstimator):
    """Keeps the last ``window`` predictions: bounded memory, and old labels are forgotten.

    A subclass says what of a prediction is kept, and which distribution the kept ones mean. They
    model the predictions of the source head, so they read the unadjusted ones.
    """

    reads_unadjusted: ClassVar[bool] = True

    def __init__(self, classes: int, window: int) -> None:
        super().__init__(classes)
        if window < 1:
            raise SettingError("window", must_be="at least 1", got=window)
        self.window = window

    @abstractmethod
    def keep(self, probs: Tensor) -> Tensor:
        """What is kept of a batch, (B, classes)."""

    @abstractmethod
    def solve(self, rows: Array, before: Array) -> Array:
        """The distribution that the kept rows mean, non-negative; ``before`` is the last one."""

    def start(self) -> State:
        """Nothing seen: uniform."""
        return {
            "rows": torch.zeros(self.window, self.classes),
            "count": torch.zeros(()),
            "estimate": torch.full((self.classes,), 1 / self.classes),
        }

    def step(self, state: State, probs: Tensor) -> State:
        """Push the batch into the window and solve again."""
        rows = torch.cat([state["rows"], self.keep(probs)])[-self.window :]
        count = min(int(state["count"]) + len(probs), self.window)
        # in double precision on the CPU: small problems, many steps
        seen = rows[self.window - count :].double().cpu().numpy()
        estimate = self.solve(seen, state["estimate"].double().cpu().numpy())
        return {
            "rows": rows,
            "count": torch.full_like(state["count"], count),
            "estimate": torch.from_numpy(estimate / estimate.sum()).to(rows),
        }

    def read(self, state: State) -> Tensor:
        """The solution."""
        return state["estimate"].clone()


class Calibrated(Windowed):
    """Keeps calibrated probabilities, softmax(log p / temperature + bias)."""

    def __init__(
        self, classes: int, window: int, temperature: float, bias: ArrayLike | Tensor | None
    ) -> None:
        super().__init__(classes, window)
        if not 0 < temperature < math.inf:
            raise SettingError("temperature", must_be="above 0 and finite", got=temperature)
        self.temperature = temperature
        self.bias = None if bias is None else torch.as_tensor(bias, dtype=torch.float64)
        if self.bias is not None and not (len(self.bias) == classes and self.bias.isfinite().all()):
            raise SettingError("bias", must_be=f"{classes} finite numbers", got=bias)

    def keep(self, probs: Tensor) -> Tensor:
        """The calibrated probabilities."""
        return scaled(probs, self.temperature, self.bias)
