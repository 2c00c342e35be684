"""Batch normalisation by the statistics of a stream, whatever the size of its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoshift.models.norm import STATISTICS, AnyBatchNorm, fused_statistics


@dataclass(slots=True)
class Look:
    """What a layer is told before a pass; no part of a module, whose attributes are slow to set.

    Attributes:
        share: Weight of the stream's statistics in the mix; 0 is evaluation mode.
        step: Weight of this batch in the stream's statistics; 1 for the first batch.
        followed: Mean and variance of the stream's images, (2, channels); a pass moves them.
        expected: Mean and variance of source images with the same labels as the stream's,
            (2, channels): the stream is compared with these. None: with all source images.
    """

    share: float = 0.0
    step: float = 1.0
    followed: Tensor | None = None
    expected: Tensor | None = None


class StreamedNorm(AnyBatchNorm):
    """Normalises by a mix of the running statistics and those of the stream, this batch included.

    The running statistics do not change.

    Attributes:
        look: What to do in the next pass.
    """

    fixed_buffers = STATISTICS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.look = Look()

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` of shape (B, C, ...)."""
        self._check_input_dim(input)
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, var = self.running_mean, self.running_var
        if self.look.share > 0:
            stream_mean, stream_var = self._statistics(input)
            mean = mean.lerp(stream_mean.to(mean.dtype), self.look.share)
            var = var.lerp(stream_var.to(var.dtype), self.look.share)
        return F.batch_norm(input, mean, var, self.weight, self.bias, False, 0, self.eps)

    @torch.no_grad()
    def _statistics(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """The stream's statistics with this batch, as they enter the mix."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.look.followed is not None
        (mean, var), step = self.look.followed, self.look.step
        batch_mean, batch_var = (s.to(mean.dtype) for s in fused_statistics(input))
        # the pooled variance of two groups, of weights 1 - step and step
        change = batch_mean - mean
        var.lerp_(batch_var, step).addcmul_(change, change, value=step * (1 - step))
        mean.add_(change, alpha=step)
        if self.look.expected is None:
            return mean, var
        expected_mean, expected_var = self.look.expected
        ratio = (var + self.eps).div_(expected_var + self.eps)
        offset = self.running_mean - expected_mean
        return torch.addcmul(mean, ratio.sqrt(), offset), ratio.mul_(self.running_var)
