"""Predict a batch, then take one step of a loss on the affine parameters of the norm layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.methods._learning import make_optimizer, norm_affine, paths
from twoshift.methods.base import Method
from twoshift.models.norm import (
    batch_norms,
    bounded_statistics,
    check_bound,
    has_iabn,
    in_training,
    use_batch_statistics,
)
from twoshift.registry import check_numbers


class OneStep(Method):
    """What TENT and IABN share: a subclass defines the loss, and may choose the statistics.

    Under batch statistics one forward pass both predicts and learns. Under running statistics, as
    in NOTE, the prediction is made in evaluation mode; a second forward pass, in training mode,
    moves the running statistics and gives the gradient.

    Args:
        model: The classifier.
        lr: Learning rate.
        optim: ``"adam"`` or ``"sgd"``.
        freeze: Paths of modules whose weights stay.
        momentum: Weight of a batch in the running statistics.
        bound: How far one batch may move the running statistics, in standard deviations: see
            `twoshift.models.norm.bounded_statistics`; None for no bound.

    Attributes:
        statistics: ``"batch"`` or ``"running"``; where a subclass leaves it empty, running on a
            model with IABN layers and batch on any other.
    """

    statistics = ""

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        optim: str = "adam",
        freeze: str | Sequence[str] = (),
        momentum: float = 0.01,
        bound: float | None = None,
    ) -> None:
        super().__init__(model)
        check_numbers("the statistics", "from 0 to 1", momentum=momentum)
        self.lr, self.optim, self.freeze, self.momentum = lr, optim, paths(freeze), momentum
        self.bound = check_bound("the statistics", bound)
        self.statistics = self.statistics_on(self.model)
        if self.statistics == "batch":
            use_batch_statistics(self.model)
        self._layers = [layer for _, layer in batch_norms(self.model)]
        for layer in self._layers:
            layer.momentum = momentum
        self.optimizer = make_optimizer(optim, norm_affine(self.model, self.freeze), lr)
        self.ready()

    @classmethod
    def statistics_on(cls, model: nn.Module) -> str:
        """Which statistics this method normalises the predictions of ``model`` by."""
        return cls.statistics or ("running" if has_iabn(model) else "batch")

    @abstractmethod
    def loss(self, logits: Tensor) -> Tensor:
        """The scalar that a step minimises."""

    def adapt(self, x: Tensor) -> Scores:
        """Predict, then step."""
        if self.statistics == "batch":
            scores = self.predict(x)
            self.minimise(self.loss(scores.logits))
            return scores
        with torch.no_grad():
            scores = self.predict(x)
        self.learn(x)
        return scores

    def learn(self, x: Tensor) -> None:
        """Move the running statistics towards those of ``x``, and step."""
        with in_training(self._layers), bounded_statistics(self._layers, self.bound):
            loss = self.loss(self.model(x))
        self.minimise(loss)
