"""Estimators that keep the last predictions and solve for the label distribution behind them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from twoshift.errors import SettingError
from twoshift.estimators._bcts import scaled
from twoshift.estimators.base import PriorEstimator, State
from twoshift.priors import check_prior, uniform
from twoshift.registry import check_numbers

Array = NDArray[np.float64]


class Windowed(PriorEstimator):
    """Keeps the last ``window`` predictions: bounded memory, and old labels are forgotten.

    A subclass defines what is kept of a prediction, and the label distribution that follows from
    the kept rows. All of them model the mistakes of the source head, so they read its predictions.
    """

    reads_unadjusted: ClassVar[bool] = True

    def __init__(self, classes: int, window: int) -> None:
        super().__init__(classes)
        check_numbers("the estimator", "at least 1", window=window)
        self.window = window

    @abstractmethod
    def keep(self, probs: Tensor) -> Tensor:
        """The rows to keep of a batch, (B, classes)."""

    @abstractmethod
    def solve(self, rows: Array, before: Array) -> Array:
        """The label distribution behind the kept rows, non-negative; ``before`` is the last one."""

    def start(self) -> State:
        """An empty window, and a uniform estimate."""
        return {
            "rows": torch.zeros(self.window, self.classes),
            "count": torch.zeros(()),
            "estimate": torch.full((self.classes,), 1 / self.classes),
        }

    def problem(self, state: State) -> str | None:
        """A number of rows that fits the window, of probabilities."""
        count = float(state["count"])
        if not 0 <= count <= self.window or count != int(count):
            return f"one with a whole count from 0 to {self.window}"
        return "one with rows of at least 0" if (state["rows"] < 0).any() else None

    def step(self, state: State, probs: Tensor) -> State:
        """Push the batch into the window and solve again."""
        rows = torch.cat([state["rows"], self.keep(probs)])[-self.window :]
        count = min(int(state["count"]) + len(probs), self.window)
        # in double precision on the CPU: small problems, many steps
        window = rows[self.window - count :].double().cpu().numpy()
        estimate = self.solve(window, state["estimate"].double().cpu().numpy())
        return {
            "rows": rows,
            "count": torch.full_like(state["count"], count),
            "estimate": torch.from_numpy(estimate / estimate.sum()).to(rows),
        }

    def read(self, state: State) -> Tensor:
        """The last solution."""
        return state["estimate"].clone()


class Calibrated(Windowed):
    """Keeps calibrated probabilities, softmax(log p / temperature + bias)."""

    def __init__(
        self, classes: int, window: int, temperature: float, bias: ArrayLike | Tensor | None
    ) -> None:
        super().__init__(classes, window)
        check_numbers("the estimator", "above 0 and finite", temperature=temperature)
        self.temperature = temperature
        self.bias = None if bias is None else numbers("bias", bias, (classes,))

    def keep(self, probs: Tensor) -> Tensor:
        """The calibrated probabilities."""
        return scaled(probs, self.temperature, self.bias)


def numbers(name: str, values: ArrayLike | Tensor, shape: tuple[int, ...]) -> Tensor:
    """A copy of the ``values`` of a setting in double precision on the CPU, or an error."""
    try:
        tensor = torch.as_tensor(values, dtype=torch.float64).detach().cpu().clone()
    except (TypeError, ValueError, RuntimeError):
        raise SettingError(name, must_be=f"numbers of shape {shape}", got=repr(values)) from None
    if tensor.shape != shape or not tensor.isfinite().all():
        got = f"shape {tuple(tensor.shape)}" if tensor.shape != shape else "NaN or infinity"
        raise SettingError(name, must_be=f"finite numbers of shape {shape}", got=got)
    return tensor


def shares(
    what: str, values: Sequence[float] | None, classes: int
) -> tuple[Array, list[float] | None]:
    """A label distribution above 0 for every class, uniform for None, and as a setting."""
    prior = uniform(classes) if values is None else check_prior(values, classes, what)
    if (prior == 0).any():
        raise SettingError(what, must_be="above 0 for every class")
    return prior, None if values is None else [float(p) for p in values]
