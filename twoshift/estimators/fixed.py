"""An estimate that never moves: uniform, or the label distribution you expect."""

from __future__ import annotations

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from twoshift.estimators.base import PriorEstimator, State, estimators
from twoshift.priors import check_prior, uniform


@estimators.register("fixed")
class Fixed(PriorEstimator):
    """A label distribution that you choose; predictions do not change it.

    Args:
        classes: Number of classes.
        prior: The label distribution; uniform by default.
    """

    def __init__(self, classes: int, prior: ArrayLike | Tensor | None = None) -> None:
        super().__init__(classes)
        if isinstance(prior, Tensor):
            prior = prior.detach().cpu().numpy()
        p = uniform(classes) if prior is None else check_prior(prior, classes)
        self._start = torch.from_numpy(p).to(torch.float32)
        self.reset()

    def start(self) -> State:
        """The chosen distribution."""
        return {"prior": self._start}

    def step(self, state: State, probs: Tensor) -> State:
        """The same state."""
        return state

    def read(self, state: State) -> Tensor:
        """The chosen distribution."""
        return state["prior"].clone()  # a caller who writes into it must not change the state
