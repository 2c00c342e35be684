"""Hybrid-TTN: each channel is normalised either by the batch's statistics or by the source's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.methods._votes import Voting
from twoshift.methods.base import methods
from twoshift.methods.bn_stats import require_plain_batch_norm
from twoshift.methods.matched import Moments, SourceMoments, given_moments, wasserstein
from twoshift.models.norm import STATISTICS, AnyBatchNorm, replace_batch_norms
from twoshift.models.statistics import fused_statistics
from twoshift.priors import check_prior, uniform
from twoshift.registry import check_choice


@methods.register("hybrid_ttn")
class HybridTTN(Voting):
    """Batch statistics for channels that labels hardly move, source statistics for the others.

    The share of channels with the batch's statistics falls with depth, from all in the first layer
    to none in the last. Within a layer, they are the channels of the lowest score: the distance of
    the batch from the running statistics, or that of the classes from them, class by class. No
    parameter moves.

    Args:
        model: The classifier, with batch normalisation.
        moments: Mean and variance of every channel for each class, as `class_moments` computes
            them from source images; only ``score="classes"`` needs them.
        score: What decides about a channel: the distance of the ``"batch"`` or of the
            ``"classes"`` from the running statistics.
        labels: Weights of the classes in the score: ``"counted"`` predictions, ``"uniform"``, or a
            share for every class.
        half_life: Images after which a counted prediction counts half.
        pseudo_count: Images of every class to add to the counted ones.
    """

    title = "Hybrid-TTN"
    reference = (
        "Vianna et al., Channel-selective normalization for label-shift robust test-time "
        "adaptation, CoLLAs 2024, https://arxiv.org/abs/2402.04958"
    )

    def __init__(
        self,
        model: nn.Module,
        moments: Moments | None = None,
        score: str = "batch",
        labels: str | Sequence[float] = "counted",
        half_life: float = 1000.0,
        pseudo_count: float = 10.0,
    ) -> None:
        super().__init__(model, half_life, pseudo_count)
        check_choice("hybrid_ttn", ("batch", "classes"), score=score)
        require_plain_batch_norm(model, "hybrid_ttn")
        self.score, self._chosen = score, _chosen(labels, len(self.counts))
        self.labels = labels if isinstance(labels, str) else tuple(map(float, labels))
        self._layers = replace_batch_norms(self.model, HybridNorm)
        last = max(1, len(self._layers) - 1)  # an only layer is a first one
        for depth, layer in enumerate(self._layers):
            layer.adapted = layer.num_features * (last - depth) // last
        wanted = score == "classes" or moments is not None
        self.moments = given_moments(moments, "hybrid_ttn") if wanted else None
        if score == "classes":
            assert self.moments is not None
            source = SourceMoments(self.model, self.moments, len(self.counts))
            running = torch.cat([layer.running() for layer in self._layers], 1)
            self._sensitivities = source.distances(running.cpu())
        self.ready()

    @property
    def prior(self) -> Tensor:
        """The label distribution that weights the classes in the score."""
        return super().prior if self._chosen is None else self._chosen.to(self.counts)

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Scores:
        """Predict; where the score needs labels, count the predicted classes."""
        if self.score == "batch":
            return self.predict(x)
        self._weigh()
        scores = self.predict(x)
        if self._chosen is None:
            self._count(scores)
        return scores

    def _weigh(self) -> None:
        """Give every layer the scores of its channels under the label distribution."""
        scores = self.prior.to(self._sensitivities) @ self._sensitivities
        sizes = [layer.num_features for layer in self._layers]
        parts = scores.to(self.device, torch.float32).split(sizes)
        for layer, part in zip(self._layers, parts, strict=True):
            layer.scores = part


def _chosen(labels: str | Sequence[float], classes: int) -> Tensor | None:
    """The label distribution that was chosen; None if labels are counted."""
    if not isinstance(labels, str):
        return torch.from_numpy(check_prior(labels, classes, "labels of hybrid_ttn"))
    check_choice("hybrid_ttn", ("counted", "uniform"), labels=labels)
    return torch.from_numpy(uniform(classes)) if labels == "uniform" else None


class HybridNorm(AnyBatchNorm):
    """Batch normalisation by the batch's statistics in some channels, the running ones in others.

    The running statistics do not change. A batch with a single value per channel is normalised by
    them.

    Attributes:
        adapted: How many channels use the batch's statistics: those of the lowest scores.
        scores: A score for every channel; None for the distance of the batch from the running
            statistics.
    """

    adapted: int = 0
    scores: Tensor | None = None
    fixed_buffers = STATISTICS

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` of shape (B, C, ...)."""
        self._check_input_dim(input)
        statistics = self.running()
        if self.adapted and input.numel() > input.shape[1]:
            batch = torch.stack(fused_statistics(input))
            distances = self.scores
            if distances is None:
                distances = wasserstein(batch, statistics.to(batch))
            lowest = distances.argsort(stable=True)[: self.adapted]
            statistics[:, lowest] = batch.to(statistics)[:, lowest]
        mean, var = statistics
        return F.batch_norm(input, mean, var, self.weight, self.bias, False, 0, self.eps)

    def running(self) -> Tensor:
        """A copy of the running mean and variance, (2, channels)."""
        assert self.running_mean is not None
        assert self.running_var is not None
        return torch.stack([self.running_mean, self.running_var])
