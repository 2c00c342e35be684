"""One number instead of C: how far the labels are tilted along the long tail of the source."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from twoshift.errors import SettingError
from twoshift.estimators._window import Array, Calibrated
from twoshift.estimators.base import estimators
from twoshift.priors import check_prior
from twoshift.registry import check_numbers

MOST_STEPS = 10_000  # finer than any data can tell; more would only take memory
_TINY = np.finfo(np.float64).tiny


@estimators.register("tilt")
class Tilt(Calibrated):
    """The power of the source's label distribution under which the last predictions are likeliest.

    pi_s ** t runs from the source's labels (t = 1) over uniform ones (0) to reversed ones (-1). A
    few hundred predictions determine one unknown far better than C; but labels that shift in
    another way are not on this line.

    Args:
        classes: Number of classes.
        source_prior: Label distribution of the training images, pi_s.
        temperature: T of the calibrated probabilities softmax(log p / T + bias).
        bias: Bias of the calibrated probabilities, one number per class; none by default.
        spread: Standard deviation of t before the first prediction.
        window: Number of predictions to keep.
        steps: Number of values of t, evenly spaced from -1.5 to 1.5.
    """

    def __init__(
        self,
        classes: int,
        source_prior: Sequence[float],
        temperature: float = 1.0,
        bias: ArrayLike | Tensor | None = None,
        spread: float = 1.0,
        window: int = 512,
        steps: int = 61,
    ) -> None:
        super().__init__(classes, window, temperature, bias)
        prior = check_prior(source_prior, classes, "source_prior of tilt")
        if (prior == 0).any():
            raise SettingError("source_prior of tilt", must_be="above 0 for every class")
        check_numbers("tilt", "above 0", spread=spread)
        check_numbers("tilt", "at least 3", steps=steps)
        if steps > MOST_STEPS:
            raise SettingError("steps of tilt", must_be=f"at most {MOST_STEPS:,}", got=steps)
        self.source_prior = [float(p) for p in source_prior]
        self.spread, self.steps = spread, steps
        self._tilts = np.linspace(-1.5, 1.5, steps)
        powers = np.exp(self._tilts[:, None] * np.log(prior))
        self._line = powers / powers.sum(1, keepdims=True)
        self.reset()

    def solve(self, rows: Array, before: Array) -> Array:
        """The mean of the distributions on the line, weighted by how well they explain the rows."""
        evidence = np.log(np.maximum(rows @ self._line.T, _TINY)).sum(0)
        evidence -= 0.5 * (self._tilts / self.spread) ** 2
        weights = np.exp(evidence - evidence.max())
        return weights @ self._line / weights.sum()
