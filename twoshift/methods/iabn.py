"""IABN at test time: running statistics that move slowly, and an entropy step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from twoshift.errors import ModelError
from twoshift.methods._learning import entropy
from twoshift.methods._one_step import OneStep
from twoshift.methods.base import methods
from twoshift.models.norm import has_iabn


@methods.register("iabn")
class IABN(OneStep):
    """IABN layers: predict by running statistics, then take an entropy step on the same batch.

    NOTE without its memory: the row "IABN" of the paper. The source model must have been trained
    with IABN layers.

    Args:
        model: The classifier.
        lr: Learning rate.
        momentum: Weight of a batch in the running statistics.
        optim: ``"adam"`` or ``"sgd"``.
        freeze: Paths of modules whose weights stay, for example ``["layer4"]``.
        bound: How far one batch may move the running statistics, in standard deviations: see
            `twoshift.models.norm.bounded_statistics`; None for no bound.
    """

    title = "IABN"
    reference = (
        "Gong et al., NOTE: Robust continual test-time adaptation against temporal correlation, "
        "NeurIPS 2022, https://arxiv.org/abs/2208.05117"
    )
    needs = frozenset({"IABN layers"})
    statistics = "running"

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-4,
        momentum: float = 0.01,
        optim: str = "adam",
        freeze: Sequence[str] = (),
        bound: float | None = None,
    ) -> None:
        if not has_iabn(model):
            raise ModelError(
                f"IABN layers in {type(model).__name__}",
                must_be="at least one, trained with the source model",
                got="none",
                cure="Train the source model with norm='iabn', or use tent.",
            )
        super().__init__(model, lr, optim, freeze, momentum, bound)

    def loss(self, logits: Tensor) -> Tensor:
        """Mean entropy."""
        return entropy(logits).mean()
