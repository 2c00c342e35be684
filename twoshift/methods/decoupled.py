"""Decoupled statistics: one mix of source and batch statistics predicts, another reads labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.methods.base import Method, methods
from twoshift.methods.bn_stats import require_plain_batch_norm
from twoshift.models.norm import MixedNorm, replace_batch_norms
from twoshift.registry import check_numbers


@methods.register("decoupled")
class Decoupled(Method):
    """Two forward passes, each normalised by its own mix of source and batch statistics.

    The batch's statistics undo the effect of the corruption on the images, but also the effect of
    the stream's labels on the predictions: frequent classes are predicted less often than they
    occur. So the prediction uses some of the batch's statistics, and the pass that an estimator of
    the label distribution reads uses less. No parameter moves.

    Args:
        model: The classifier.
        share: The batch's share of the statistics in the pass that predicts.
        label_share: Its share in the pass that label estimators read; there is one only with an
            adapter.
    """

    title = "Decoupled statistics"
    reference = (
        "ours; mixed statistics: You et al., Test-time batch statistics calibration for covariate "
        "shift, 2021, https://arxiv.org/abs/2110.04065"
    )
    statistics = "running"

    def __init__(self, model: nn.Module, share: float = 0.2, label_share: float = 0.1) -> None:
        super().__init__(model)
        check_numbers("decoupled", "from 0 to 1", share=share, label_share=label_share)
        require_plain_batch_norm(model, "decoupled")
        self.share, self.label_share = share, label_share
        self._layers = replace_batch_norms(self.model, MixedNorm)
        self.ready()

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Scores:
        """Logits under one mix; raw logits, for estimators, under the other."""
        self._mix(self.share)
        scores = self.predict(x)
        if scores.raw is scores.logits:  # no adapter, so no estimator
            return scores
        self._mix(self.label_share)
        return scores._replace(raw=self.predict(x).raw, apart=True)

    def _mix(self, share: float) -> None:
        for layer in self._layers:
            layer.share = share
