"""The accuracy that a live model is expected to have, without labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from twoshift.accuracy.signals import NAMES, read_signals, signal_count, signals_of
from twoshift.accuracy.views import VIEWS
from twoshift.errors import MismatchError, SettingError
from twoshift.tensors import PLAIN, oddity

HALF_LIFE = 256.0  # images; a window of 512 knows about as much
WINDOW = 256  # images of the windows that the interval was fitted on
COLUMNS = len(NAMES) + 4  # weights, then intercept, lower and upper error, threshold


class Expected(NamedTuple):
    """An expected accuracy, from 0 to 1, and the interval that it is in with 95 % confidence."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"


class ExpectedAccuracy:
    """Follows the signals of the predictions of a stream.

    Args:
        classes: Number of classes.
        judge: By view, the weights of the signals, the intercept, the errors of the regression on
            a corruption that it had not seen (2.5th and 97.5th percentile), and the confidence
            above which an image is sure, (views, 8).
    """

    def __init__(self, classes: int, judge: Tensor) -> None:
        judge = torch.as_tensor(judge).detach().cpu().double()
        shape = (len(VIEWS), COLUMNS)
        if judge.shape != shape or not judge.isfinite().all():
            got = tuple(judge.shape) if judge.shape != shape else "NaN or infinity"
            raise SettingError("accuracy_judge", must_be=f"finite numbers of {shape}", got=got)
        self.judge = judge
        self._sums = torch.zeros(signal_count(classes), dtype=torch.float64)
        self._view = 0.0

    def update(self, probs: Tensor, view: int) -> None:
        """Take in the predicted probabilities of a batch, as the model answers."""
        sums = signals_of(probs.cpu(), float(self.judge[view, -1]))
        keep = 0.5 ** (len(probs) / HALF_LIFE) if view == self._view else 0.0
        # of a large batch, the images count alike
        self._sums, self._view = keep * self._sums + sums, float(view)

    def read(self) -> Expected | None:
        """The expected accuracy of the last hundreds of predictions; None before the first."""
        if self._sums[0] < 1:
            return None
        row = self.judge[int(self._view)]
        value = float(read_signals(self._sums) @ row[: len(NAMES)] + row[len(NAMES)])
        wider = max(1.0, WINDOW / float(self._sums[0])) ** 0.5  # fewer images say less
        errors = row[len(NAMES) + 1 : len(NAMES) + 3]
        low, high = (value + wider * float(error) for error in errors)
        return Expected(*(min(max(v, 0.0), 1.0) for v in (value, low, high)))

    def state(self) -> dict[str, Tensor]:
        """A copy of everything that batches change."""
        return {"sums": self._sums.clone(), "view": torch.tensor(self._view)}

    def start(self) -> dict[str, Tensor]:
        """The state before the first batch."""
        return {"sums": torch.zeros_like(self._sums), "view": torch.zeros(())}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse a state that is not one of this kind, by a MismatchError."""
        if state.keys() != {"sums", "view"}:
            must_be = "one with sums and view"
            raise MismatchError("state of the accuracy", must_be=must_be, got=sorted(state))
        for name, tensor in state.items():
            if odd := oddity(tensor) or (tensor.is_complex() and "complex numbers"):
                raise MismatchError(f"state of the accuracy, {name}", must_be=PLAIN, got=odd)
        sums, view = state["sums"], state["view"]
        if sums.shape != self._sums.shape or not sums.isfinite().all() or (sums < 0).any():
            must_be = f"{tuple(self._sums.shape)}, finite, at least 0"
            raise MismatchError("sums of the accuracy", must_be=must_be, got=tuple(sums.shape))
        if view.shape != () or float(view) not in range(len(VIEWS)):
            raise MismatchError("view of the accuracy", must_be=f"0 to {len(VIEWS) - 1}")

    def hold(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state that is known to fit."""
        self._sums, self._view = state["sums"].double().cpu().clone(), float(state["view"])
