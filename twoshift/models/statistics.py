"""Mean and variance of the channels of a batch, or of each of its images."""

from __future__ import annotations

import torch
from torch import Tensor

from twoshift.models.base import expand

FUSED_ROWS, FUSED_CHANNELS = 4096, 16  # fewer channels do not fill the registers of a CPU
FUSED_TYPES = (torch.float32, torch.float64)


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel of a batch (B, C, ...), in float32 or better."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # squares overflow float16
    others = [d for d in range(x.dim()) if d != 1]
    mean = x.mean(others)
    return mean, (x - expand(mean, x)).square().mean(others)  # much faster than var_mean on a CPU


def fused_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """What `batch_statistics` returns, up to rounding, several times faster where torch can do so.

    That is on a CPU without gradients, where the channels of a position lie side by side: vectors,
    and images with channels last. One kernel then reads the batch without writing a copy of it.
    Anywhere else, `batch_statistics` is what is fast or has a gradient.
    """
    if torch.compiler.is_compiling() or not _fusible(x):  # a compiler fuses by itself
        return batch_statistics(x)
    channels = x.shape[1]
    parts = -(-x.numel() // (FUSED_ROWS * channels))
    if parts == 1 and x.dim() == 4:
        return torch.batch_norm_update_stats(x, None, None, 0.0)
    rows = x.movedim(1, -1).flatten(0, -2)
    if parts == 1:
        return torch.batch_norm_update_stats(rows, None, None, 0.0)
    # The kernel adds up rows one by one, in float32: a sum over more of them would lose digits. So
    # some rows are taken for one row of as many channels, which also fills its registers.
    whole = len(rows) - len(rows) % parts
    wide = torch.batch_norm_update_stats(rows[:whole].view(-1, parts * channels), None, None, 0.0)
    mean, var = pooled(*(each.view(parts, channels) for each in wide))
    if whole == len(rows):
        return mean, var
    rest = torch.batch_norm_update_stats(rows[whole:], None, None, 0.0)
    change, step = rest[0] - mean, 1 - whole / len(rows)
    var = var.lerp(rest[1], step).addcmul_(change, change, value=step * (1 - step))
    return mean.add_(change, alpha=step), var


def pooled(means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of groups of the same size together, of those of each, (groups, C)."""
    mean = means.mean(0)
    return mean, (means - mean).square_().add_(variances).mean(0)


def _fusible(x: Tensor) -> bool:
    """Whether a kernel is made for a batch: its channels lie side by side, and there are enough."""
    if not x.is_cpu or x.shape[1] < FUSED_CHANNELS or x.dtype not in FUSED_TYPES:
        return False
    if torch.is_grad_enabled() and x.requires_grad:
        return False
    if x.dim() == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).is_contiguous()


def image_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel of every image, (B, C), in float32 or better."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # squares overflow float16
    positions = tuple(range(2, x.dim()))
    if not positions:
        return x, torch.zeros_like(x)
    mean = x.mean(positions)
    return mean, (x - expand(mean, x)).square_().mean(positions)  # var_mean is slow on a CPU
