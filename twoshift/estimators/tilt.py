"""One number, not C: how far the labels are tilted along the long tail of the source."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from twoshift.errors import SettingError
from twoshift.estimators._window import Array, Calibrated
from twoshift.estimators.base import estimators
from twoshift.priors import check_prior

_TINY = np.finfo(np.float64).tiny


@estimators.register("tilt")
class Tilt(Calibrated):
    """The power of the source's label distribution under which the last predictions are likeliest.

    pi_s ** t runs from the source's labels (t = 1) over uniform ones (0) to reversed ones (-1).
    One unknown is read off a few hundred predictions far more surely than C of them; labels that
    shift in another way are not on the line.

    Args:
        classes: Number of classes.
        source_prior: Label distribution of the training images, pi_s.
        temperature: Of the calibration softmax(log p / temperature + bias).
        bias: Of the calibration, one per class; none by default.
        spread: Standard deviation of t that is expected before anything is seen.
        window: Predictions to keep.
        steps: Places on the line, from -1.5 to 1.5.
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
        if not spread > 0:
            raise SettingError("spread of tilt", must_be="above 0", got=spread)
        if steps < 3:
            raise SettingError("steps of tilt", must_be="at least 3", got=steps)
        self.source_prior = [float(p) for p in source_prior]
        self.spread, self.steps = spread, steps
        self._places = np.linspace(-1.5, 1.5, steps)
        powers = np.exp(self._places[:, None] * np.log(prior))
        self._line = powers / powers.sum(1, keepdims=True)
        self.reset()

    def solve(self, rows: Array, before: Array) -> Array:
        """The mean of the line's distributions, each as likely as it makes the kept rows."""
        evidence = np.log(np.maximum(rows @ self._line.T, _TINY)).sum(0)
        evidence -= 0.5 * (self._places / self.spread) ** 2
        weights = np.exp(evidence - evidence.max())
        return weights @ self._line / weights.sum()
