"""BN stats: every batch is normalised by its own statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.errors import ModelError
from twoshift.methods.base import Method, methods
from twoshift.models.norm import batch_norms, has_iabn, use_batch_statistics


@methods.register("bn_stats")
class BNStats(Method):
    """Batch normalisation by the statistics of the test batch; no parameter moves."""

    title = "BN stats"
    reference = (
        "Schneider et al., Improving robustness against common corruptions by covariate shift "
        "adaptation, NeurIPS 2020, https://arxiv.org/abs/2006.16971"
    )
    statistics = "batch"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        require_batch_norm(model)
        use_batch_statistics(self.model)
        self.ready()

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Scores:
        """Predict by the batch's own statistics."""
        return self.predict(x)


def require_batch_norm(model: nn.Module) -> None:
    """Refuse a model without batch normalisation."""
    if not any(batch_norms(model)):
        raise ModelError(
            f"batch normalisation layers in {type(model).__name__}",
            must_be="at least one, since their statistics are what adapts",
            got="none",
        )


def require_plain_batch_norm(model: nn.Module, method: str) -> None:
    """Refuse a model without batch normalisation, with IABN, or without running statistics."""
    require_batch_norm(model)
    if has_iabn(model):
        raise ModelError(
            f"normalisation layers of {type(model).__name__} for {method}",
            must_be="plain batch normalisation",
            got="IABN layers, which mix statistics themselves",
            cure="Use iabn, or a source model trained with norm='bn'.",
        )
    for name, layer in batch_norms(model):
        if layer.running_mean is None:
            raise ModelError(
                f"batch normalisation {name!r} for {method}",
                must_be="with running statistics",
                got="track_running_stats=False",
                cure="Use bn_stats or tent.",
            )
