"""DELTA: moving test statistics, and entropy steps that give rare classes more weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.methods._learning import entropy, make_optimizer, norm_affine, paths
from twoshift.methods.base import Method, methods
from twoshift.models.head import class_count
from twoshift.models.norm import (
    BatchStatNorm,
    batch_norms,
    check_bound,
    keep_what_follows,
    replace_module,
    use_batch_statistics,
)
from twoshift.registry import check_numbers

SURE = 0.5  # share of the highest possible entropy, for Ent-W
RAREST = 1e-12  # a class that never occurs must not have infinite weight


@methods.register("delta")
class DELTA(Method):
    """Test-time batch renormalisation, and one entropy step weighted against frequent classes.

    The statistics move over the test batches, and the gradient passes through the batch's own.
    The logits of the forward pass before the step are the prediction. Layer and group norms have
    no batch statistics, and IABN takes the batch as reference: only the weighting applies to them.

    Args:
        model: The classifier.
        lr: Learning rate.
        optim: ``"adam"`` or ``"sgd"``.
        statistics_momentum: Weight of a batch in the moving statistics.
        class_momentum: Weight of a batch in the moving class frequencies.
        weighted: Learn from sure samples only, with more weight on surer ones (Ent-W).
        freeze: Paths of modules whose weights stay, for example ``["layer4"]``.
        bound: How far one batch after the first may move the statistics, in standard deviations:
            see `twoshift.models.norm.bounded_statistics`; None for no bound.
    """

    title = "DELTA"
    reference = (
        "Zhao et al., DELTA: degradation-free fully test-time adaptation, ICLR 2023, "
        "https://arxiv.org/abs/2301.13018"
    )
    statistics = "batch"
    not_negative = frozenset({"frequencies"})
    frequencies: Tensor

    def __init__(
        self,
        model: nn.Module,
        lr: float = 2.5e-4,
        optim: str = "sgd",
        statistics_momentum: float = 0.05,
        class_momentum: float = 0.05,
        weighted: bool = False,
        freeze: Sequence[str] = (),
        bound: float | None = None,
    ) -> None:
        super().__init__(model)
        momenta = {"statistics_momentum": statistics_momentum, "class_momentum": class_momentum}
        check_numbers("delta", "from 0 to 1", **momenta)
        self.lr, self.optim, self.freeze, self.weighted = lr, optim, paths(freeze), weighted
        self.statistics_momentum, self.class_momentum = statistics_momentum, class_momentum
        self.bound = check_bound("delta", bound)
        with torch.inference_mode(False):
            use_renormalisation(self.model, statistics_momentum, bound)
            affine, classes = norm_affine(self.model, self.freeze), class_count(self.model)
            self.register_buffer("frequencies", affine[0].new_full((classes,), 1 / classes))
        self.optimizer = make_optimizer(optim, affine, lr)
        self.ready()

    def adapt(self, x: Tensor) -> Scores:
        """Predict, step, and update the class frequencies."""
        scores = self.predict(x)
        logits = scores.logits
        p, unsure = logits.detach().softmax(1), entropy(logits)
        weight = 1 / self.frequencies.clamp(min=RAREST)[p.argmax(1)]
        weight = weight / weight.mean()
        if self.weighted:
            weight = weight * (SURE * math.log(logits.shape[1]) - unsure.detach()).exp()
            sure = unsure.detach() < SURE * math.log(logits.shape[1])
            weight, unsure = weight[sure], unsure[sure]
        if len(unsure):
            self.minimise((weight * unsure).mean())
        self.frequencies.lerp_(p.mean(0).to(self.frequencies), self.class_momentum)
        return scores


class BatchRenorm(BatchStatNorm):
    """Normalisation by statistics that move over test batches, with the gradient of the batch's.

    They start at the first batch. The output is that of the moving statistics; these count as
    constants, and the gradient flows through the mean and deviation of the batch. A channel with
    a single value is normalised by the source's statistics and moves nothing.

    Args:
        layer: The layer to replace; weights and source statistics are shared with it.
        momentum: Weight of a batch in the moving statistics.
        bound: How far a batch after the first may move them, in standard deviations; None for any
            distance.
    """

    test_mean: Tensor
    test_std: Tensor
    seen: Tensor

    def __init__(self, layer: BatchStatNorm, momentum: float, bound: float | None = None) -> None:
        super().__init__(layer.num_features, layer.eps, momentum, layer.affine)
        self.weight, self.bias = layer.weight, layer.bias
        self.running_mean, self.running_var = layer.running_mean, layer.running_var
        self.num_batches_tracked = layer.num_batches_tracked
        like = next((t for t in (*layer.parameters(), *layer.buffers())), torch.empty(0))
        self.register_buffer("test_mean", like.new_zeros(layer.num_features))
        self.register_buffer("test_std", like.new_ones(layer.num_features))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool, device=like.device))
        self.bound = bound
        self.eval()

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` of shape (B, C, ...), and move the statistics."""
        if input.numel() == input.shape[1]:
            return super().forward(input)
        self._check_input_dim(input)
        scale, shift = self._follow(input.detach())
        # one fused pass: (normalised * scale + shift) * weight + bias
        bias = shift if self.weight is None else shift * self.weight + self.bias
        weight = scale if self.weight is None else scale * self.weight
        return F.batch_norm(input, None, None, weight, bias, True, 0, self.eps)

    @torch.no_grad()
    def _follow(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and shift from the batch's statistics to the moving ones, which then move."""
        others = [i for i in range(x.dim()) if i != 1]
        # two plain reductions: torch.var_mean is many times slower on a CPU
        mean = x.mean(others, keepdim=True)
        std = (x - mean).square_().mean(others).add_(self.eps).sqrt_()
        mean = mean.flatten()
        old_mean = torch.where(self.seen, self.test_mean, mean)
        old_std = torch.where(self.seen, self.test_std, std)
        assert self.momentum is not None
        near = self._bounded(mean, std, old_mean, old_std)
        self.test_mean.copy_(old_mean.lerp(near[0], self.momentum))
        self.test_std.copy_(old_std.lerp(near[1], self.momentum))
        self.seen.fill_(True)
        return std / old_std, (mean - old_mean) / old_std

    def _bounded(
        self, mean: Tensor, std: Tensor, old_mean: Tensor, old_std: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The batch's statistics as they enter the moving ones."""
        if self.bound is None:
            return mean, std
        reach, factor = self.bound * old_std, 1 + self.bound
        mean = mean.clamp(old_mean - reach, old_mean + reach)
        return mean, std.clamp(old_std / factor, old_std * factor)


def use_renormalisation(model: nn.Module, momentum: float, bound: float | None = None) -> None:
    """Replace every batch normalisation in ``model`` by a `BatchRenorm`.

    IABN layers remain, with the batch as reference.
    """
    use_batch_statistics(model)
    for name, layer in list(batch_norms(model)):
        if isinstance(layer, BatchStatNorm):
            new = BatchRenorm(layer, momentum, bound)
            keep_what_follows(layer, new)
            replace_module(model, name, new)
