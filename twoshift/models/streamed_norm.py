"""Batch normalisation by the statistics of a stream, whatever the size of its batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from twoshift.models.norm import STATISTICS, AnyBatchNorm, fused_statistics


class Expected(NamedTuple):
    """Source images with the same labels as the stream's: what the stream is compared with.

    All are vectors with an entry per channel, computed for all layers at once; m and v are the
    expected mean and variance, M and V those of all source images.

    Attributes:
        inverse: 1 / (v + eps).
        floor: eps / (v + eps).
        offset: M - m.
        rest: (1 - share) V.
        part: share V.
    """

    inverse: Tensor
    floor: Tensor
    offset: Tensor
    rest: Tensor
    part: Tensor


class Look(NamedTuple):
    """How a layer normalises the next batch.

    Attributes:
        share: Weight of the stream's statistics in the mix.
        step: Weight of this batch in the stream's statistics; 1 for the first batch.
        mean: Mean of the stream's images, (channels,); a pass moves it.
        var: Their variance, likewise.
        expected: What the stream is compared with. None: with all source images.
    """

    share: float
    step: float
    mean: Tensor
    var: Tensor
    expected: Expected | None = None


class StreamedNorm(AnyBatchNorm):
    """Normalises by a mix of the running statistics and those of the stream, this batch included.

    The running statistics do not change.

    Attributes:
        look: How to normalise; None is evaluation mode.
    """

    fixed_buffers = STATISTICS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.look: Look | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` of shape (B, C, ...)."""
        self._check_input_dim(input)
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, var = self.running_mean, self.running_var
        if self.look is not None:  # the caller allows no gradients
            mean, var = _mixed(input, mean, var, self.look)
        weight, bias = self.weight, self.bias
        return torch.batch_norm(input, weight, bias, mean, var, False, 0.0, self.eps, False)


def _mixed(input: Tensor, running: Tensor, spread: Tensor, look: Look) -> tuple[Tensor, Tensor]:
    """Mean and variance to normalise by; a single image is mostly such small operations."""
    share, step, mean, var, expected = look
    batch_mean, batch_var = fused_statistics(input)
    same = batch_mean.dtype == mean.dtype == running.dtype
    if not same:  # of half precision
        batch_mean, batch_var = batch_mean.to(mean.dtype), batch_var.to(var.dtype)
        running, spread = running.to(mean.dtype), spread.to(var.dtype)
    # the pooled variance of two groups, of weights 1 - step and step
    change = batch_mean - mean
    var.lerp_(batch_var, step).addcmul_(change, change, value=step * (1 - step))
    mean.add_(change, alpha=step)
    if expected is None:
        mixed = running.lerp(mean, share), spread.lerp(var, share)
    else:
        inverse, floor, offset, rest, part = expected
        ratio = torch.addcmul(floor, var, inverse)  # (var + eps) / (v + eps)
        matched = torch.addcmul(mean, ratio.sqrt(), offset)
        mixed = running.lerp(matched, share), torch.addcmul(rest, ratio, part)
    return mixed if same else (mixed[0].to(input.dtype), mixed[1].to(input.dtype))
