"""FMAPLS: EM with a Dirichlet prior that follows the estimate; over a window, or image by image.

"Full maximum a posteriori label shift" estimation, https://arxiv.org/abs/2511.18615.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from twoshift.estimators._bcts import scaled
from twoshift.estimators._window import Array, Calibrated, numbers, shares
from twoshift.estimators.base import PriorEstimator, State, estimators
from twoshift.priors import uniform
from twoshift.registry import check_numbers

FLOOR = 1e-6  # smallest share of a class: one at zero could not come back


@estimators.register("fmapls")
class FMAPLS(Calibrated):
    """EM over the last predictions; the largest class has ``concentration`` images beside them.

    Args:
        classes: Number of classes.
        model_prior: Label distribution that the (calibrated) probabilities assume; uniform by
            default, as for ``em``.
        temperature: T of the calibrated probabilities softmax(log p / T + bias).
        bias: Bias of the calibrated probabilities, one number per class; none by default.
        concentration: The prior's parameter of the most frequent class; others in proportion.
        window: Number of predictions to keep.
        max_steps: Largest number of EM steps per batch.
        tol: Stop when a step moves the distribution by less (sum of absolute changes).
    """

    def __init__(
        self,
        classes: int,
        model_prior: Sequence[float] | None = None,
        temperature: float = 1.0,
        bias: ArrayLike | Tensor | None = None,
        concentration: float = 1000.0,
        window: int = 512,
        max_steps: int = 100,
        tol: float = 1e-6,
    ) -> None:
        super().__init__(classes, window, temperature, bias)
        check_numbers("fmapls", "at least 1", concentration=concentration, max_steps=max_steps)
        check_numbers("fmapls", "at least 0", tol=tol)
        self._assumed, self.model_prior = shares("model_prior of fmapls", model_prior, classes)
        self.concentration, self.max_steps, self.tol = concentration, max_steps, tol
        self.reset()

    def solve(self, rows: Array, before: Array) -> Array:
        """Estimate and prior in turn, from uniform and a flat prior."""
        ratios, q, alpha = rows / self._assumed, uniform(self.classes), np.ones(self.classes)
        for _ in range(self.max_steps):
            counts = q * (ratios.T @ (1 / (ratios @ q)))
            new = moved(alpha, counts)
            alpha = following(new, self.concentration)
            done = np.abs(new - q).sum() < self.tol
            q = new
            if done:
                break
        return q


@estimators.register("online_fmapls")
class OnlineFMAPLS(PriorEstimator):
    """The same image by image: nothing is kept but the estimate and the last predicted class.

    Args:
        classes: Number of classes.
        model_prior: Label distribution that the (calibrated) probabilities assume; uniform by
            default, as for ``em``.
        temperature: T of the calibrated probabilities softmax(log p / T + bias).
        bias: Bias of the calibrated probabilities, one number per class; none by default.
        concentration: The prior's parameter of the most frequent class; others in proportion. An
            image moves the estimate by about its share of one over their sum.
        softness: Weight of the posterior of an image; the rest is that of the class before it.
    """

    reads_unadjusted: ClassVar[bool] = True

    def __init__(
        self,
        classes: int,
        model_prior: Sequence[float] | None = None,
        temperature: float = 1.0,
        bias: ArrayLike | Tensor | None = None,
        concentration: float = 100.0,
        softness: float = 0.1,
    ) -> None:
        super().__init__(classes)
        check_numbers("online_fmapls", "above 0 and finite", temperature=temperature)
        check_numbers("online_fmapls", "at least 1", concentration=concentration)
        check_numbers("online_fmapls", "from 0 to 1", softness=softness)
        prior = shares("model_prior of online_fmapls", model_prior, classes)
        self._assumed, self.model_prior = prior
        self.temperature, self.concentration, self.softness = temperature, concentration, softness
        self.bias = None if bias is None else numbers("bias", bias, (classes,))
        self.reset()

    def start(self) -> State:
        """A uniform estimate, and no class before."""
        return {
            "estimate": torch.full((self.classes,), 1 / self.classes),
            "last": torch.full((), -1),
        }

    def step(self, state: State, probs: Tensor) -> State:
        """Move by one image after the other."""
        # in double precision on the CPU: small problems, many steps
        rows = scaled(probs, self.temperature, self.bias).double().cpu().numpy() / self._assumed
        q, last = state["estimate"].double().cpu().numpy(), int(state["last"])
        for row in rows:
            posterior = row * q
            predicted = int(posterior.argmax())
            counts = posterior * (self.softness / posterior.sum())
            counts[predicted if last < 0 else last] += 1 - self.softness
            last = predicted
            # the mean, not the mode: one less of every class at every image empties all but one
            q = moved(following(q, self.concentration) + 1, counts)
        estimate = torch.from_numpy(q).to(state["estimate"])
        return {"estimate": estimate, "last": torch.full_like(state["last"], last)}

    def read(self, state: State) -> Tensor:
        """The estimate after the last image."""
        return state["estimate"].clone()

    def problem(self, state: State) -> str | None:
        """A class that there is, or none before the first image."""
        if not -1 <= int(state["last"]) < self.classes:
            return f"one with a last class from -1 to {self.classes - 1}"
        return "one with an estimate above 0" if (state["estimate"] <= 0).any() else None


def moved(alpha: Array, counts: Array) -> Array:
    """The mode of a Dirichlet posterior, above 0 for every class."""
    q = np.maximum(alpha - 1 + counts, 0)
    q = np.maximum(q / q.sum(), FLOOR) if q.any() else np.full_like(q, 1 / len(q))
    mode: Array = q / q.sum()
    return mode


def following(estimate: Array, concentration: float) -> Array:
    """The parameters of a Dirichlet prior in proportion to an estimate."""
    parameters: Array = concentration * estimate / estimate.max()
    return parameters
