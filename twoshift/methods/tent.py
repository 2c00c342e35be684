"""TENT: entropy minimisation on the affine parameters of the normalisation layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from twoshift.methods._learning import entropy
from twoshift.methods._one_step import OneStep
from twoshift.methods.base import methods


@methods.register("tent")
class Tent(OneStep):
    """Batch statistics, and one entropy step per batch on the norm layers' weights and biases.

    The logits of the forward pass before the step are the prediction. Layer and group norms
    have no batch statistics; only their weights move.

    Args:
        model: The classifier.
        lr: Learning rate.
        optim: ``"adam"`` or ``"sgd"`` (momentum 0.9, as on ImageNet).
        freeze: Paths of modules whose weights stay, for example ``["layer4"]``.
    """

    title = "TENT"
    reference = (
        "Wang et al., Tent: Fully test-time adaptation by entropy minimization, ICLR 2021, "
        "https://arxiv.org/abs/2006.10726"
    )
    statistics = "batch"

    def __init__(
        self, model: nn.Module, lr: float = 1e-3, optim: str = "adam", freeze: Sequence[str] = ()
    ) -> None:
        super().__init__(model, lr, optim, freeze)

    def loss(self, logits: Tensor) -> Tensor:
        """Mean entropy."""
        return entropy(logits).mean()
