"""BN Stats: every batch is normalised by its own statistics."""

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
        """Logits under the batch's own statistics."""
        return self.predict(x)


def require_batch_norm(model: nn.Module) -> None:
    """Refuse a model without batch normalisation."""
    if not any(batch_norms(model)):
        raise ModelError(
            f"batch normalisation layers in {type(model).__name__}",
            must_be="at least one, since their statistics are what adapts",
            got="none",
        )


def require_plain_batch_norm(model: nn.Module, whose: str) -> None:
    """Refuse a model whose batch normalisations have no statistics to mix, or mix by themselves."""
    require_batch_norm(model)
    if has_iabn(model):
        raise ModelError(
            f"{whose} statistics of IABN layers, which mix by themselves",
            cure="Use iabn, or a source model with plain batch normalisation.",
        )
    for name, layer in batch_norms(model):
        if layer.running_mean is None:
            raise ModelError(
                f"{whose} statistics of {name}",
                must_be="mixed with running ones",
                got="track_running_stats=False",
                cure="Use bn_stats or tent.",
            )
