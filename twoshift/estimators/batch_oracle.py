"""The true labels of every batch: what an estimator that reads the batch itself could return."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from twoshift.errors import PriorError
from twoshift.estimators.base import PriorEstimator, State, estimators
from twoshift.priors import check_prior


@estimators.register("batch_oracle")
class BatchOracle(PriorEstimator):
    """The true label distribution of each batch, given by the caller; an upper bound, no method.

    Args:
        classes: Number of classes.
        batch_priors: Label distribution of every batch of the stream, (batches, classes), for
            example ``Stream.batch_priors``. The last one stays after the end.
    """

    is_oracle: ClassVar[bool] = True
    counts_batch: ClassVar[bool] = True

    def __init__(self, classes: int, batch_priors: ArrayLike | Tensor) -> None:
        super().__init__(classes)
        told = np.asarray(torch.as_tensor(batch_priors).detach().cpu().double())
        if told.ndim != 2 or not len(told):
            must_be = f"one label distribution per batch, (batches, {classes})"
            raise PriorError("batch_priors of batch_oracle", must_be=must_be, got=told.shape)
        self.batch_priors = torch.from_numpy(np.stack([check_prior(p, classes) for p in told]))
        self.reset()

    def start(self) -> State:
        """No batch yet."""
        return {"batches": torch.zeros(())}

    def step(self, state: State, probs: Tensor) -> State:
        """One batch more."""
        return {"batches": state["batches"] + 1}

    def read(self, state: State) -> Tensor:
        """The labels of the last batch; before the first, its own."""
        last = min(max(int(state["batches"]) - 1, 0), len(self.batch_priors) - 1)
        return self.batch_priors[last].float().to(state["batches"].device)

    def problem(self, state: State) -> str | None:
        """A number of batches."""
        return None if state["batches"] >= 0 else "one with at least 0 batches"
