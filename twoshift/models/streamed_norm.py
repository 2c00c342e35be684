"""Batch normalisation by the statistics of a stream, whatever the size of its batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from twoshift.models.norm import STATISTICS, AnyBatchNorm, fused_statistics


class StreamedNorm(AnyBatchNorm):
    """Normalises by a mix of the running statistics and those of the stream, this batch included.

    The running statistics do not change. The attributes are set before every pass.

    Attributes:
        share: Weight of the stream's statistics in the mix; 0 is evaluation mode.
        step: Weight of this batch in the stream's statistics; 1 for the first batch.
        followed: Mean and variance of the stream's images, (2, channels); a pass moves them.
        expected: Mean and variance of source images with the same labels as the stream's,
            (2, channels): the stream is compared with these. None: with all source images.
    """

    fixed_buffers = STATISTICS
    share: float = 0.0
    step: float = 1.0
    followed: Tensor
    expected: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` of shape (B, C, ...)."""
        self._check_input_dim(input)
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, var = self.running_mean, self.running_var
        if self.share > 0:
            stream_mean, stream_var = (s.to(mean.dtype) for s in self._statistics(input))
            mean, var = mean.lerp(stream_mean, self.share), var.lerp(stream_var, self.share)
        return F.batch_norm(input, mean, var, self.weight, self.bias, False, 0, self.eps)

    @torch.no_grad()
    def _statistics(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """The stream's statistics with this batch, as they enter the mix."""
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, var = self.followed
        batch_mean, batch_var = (s.to(mean.dtype) for s in fused_statistics(input))
        # the pooled variance of two groups, of weights 1 - step and step
        change = batch_mean - mean
        var.lerp_(batch_var, self.step).addcmul_(change, change, value=self.step * (1 - self.step))
        mean.add_(change, alpha=self.step)
        if self.expected is None:
            return mean, var
        expected_mean, expected_var = self.expected
        scale = ((var + self.eps) / (expected_var + self.eps)).sqrt_()
        return mean + scale * (self.running_mean - expected_mean), scale**2 * self.running_var
