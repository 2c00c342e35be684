"""Methods that know the labels of their stream by the classes they predict."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.adapters import Scores, unbiased
from twoshift.estimators import DecayedCounts
from twoshift.methods.base import Method
from twoshift.models.head import class_count


class Voting(Method):
    """Counts the predicted classes, by the original head; older predictions count less.

    Predictions are counted without the label distribution that an adapter knows its logits
    contain.

    Args:
        model: The classifier.
        half_life: Images after which a prediction counts half.
        pseudo_count: Images of every class to add to the predicted ones.
    """

    not_negative = frozenset({"counts"})
    counts: Tensor

    def __init__(self, model: nn.Module, half_life: float, pseudo_count: float) -> None:
        super().__init__(model)
        self.half_life, self.pseudo_count = half_life, pseudo_count
        classes = class_count(self.model)
        self._votes = DecayedCounts(classes, half_life, pseudo_count)
        with torch.inference_mode(False):  # a buffer that can be written later
            self.register_buffer("counts", torch.zeros(classes, device=self.device))

    @property
    def prior(self) -> Tensor:
        """The label distribution that the next batch is taken to have."""
        with self._using():
            return self._votes.read({"counts": self.counts})

    def _count(self, scores: Scores) -> None:
        """Add the classes that a batch is predicted to be of."""
        predicted = unbiased(self.model, scores.raw).argmax(1)
        votes = F.one_hot(predicted, len(self.counts)).to(self.counts)
        self.counts.copy_(self._votes.step({"counts": self.counts}, votes)["counts"])
