"""PseudoLabel: the model's own hard labels as targets."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.errors import SettingError
from twoshift.methods._one_step import OneStep
from twoshift.methods.base import methods


@methods.register("pseudo_label")
class PseudoLabel(OneStep):
    """Batch statistics, and one step per batch towards the most likely classes.

    One forward pass predicts, gives the labels, and learns. Only the weights and biases of the
    normalisation layers move.

    Args:
        model: The classifier.
        lr: Learning rate.
        optim: ``"adam"`` or ``"sgd"``.
        threshold: Learn only from samples whose confidence is above this; from all if None.
        freeze: Paths of modules whose weights stay, for example ``["layer4"]``.
    """

    title = "PseudoLabel"
    reference = (
        "Lee, Pseudo-label: The simple and efficient semi-supervised learning method for deep "
        "neural networks, ICML workshop 2013"
    )

    statistics = "batch"

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        optim: str = "adam",
        threshold: float | None = None,
        freeze: Sequence[str] = (),
    ) -> None:
        if threshold is not None and not 0 <= threshold < 1:
            raise SettingError("threshold", must_be="from 0, below 1, or None", got=threshold)
        super().__init__(model, lr, optim, freeze)
        self.threshold = threshold

    def adapt(self, x: Tensor) -> Scores:
        """Predict, then step, unless no sample is sure enough."""
        scores = self.predict(x)
        sure = logits = scores.logits
        if self.threshold is not None:
            sure = logits[logits.detach().softmax(1).amax(1) > self.threshold]
        if len(sure):
            self.minimise(self.loss(sure))
        return scores

    def loss(self, logits: Tensor) -> Tensor:
        """Mean cross-entropy with the most likely classes."""
        return F.cross_entropy(logits, logits.argmax(1))
