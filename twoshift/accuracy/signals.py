"""What predictions look like, in sums over images, so that batches of any size add up."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SUMS = 4  # numbers beside the summed probabilities
NAMES = ("confidence", "entropy", "sure", "diversity")


def signal_count(classes: int) -> int:
    """How many sums `signals_of` returns."""
    return SUMS + classes


def signals_of(probs: Tensor, threshold: float = 1.0) -> Tensor:
    """Sums over a batch: images, confidences, entropies, sure images, and probabilities.

    Args:
        probs: Calibrated probabilities, (B, classes).
        threshold: An image whose confidence is above it is sure.
    """
    probs = probs.double()
    confidence = probs.amax(1)
    entropy = torch.special.entr(probs).sum(1)
    sure = confidence > threshold
    sums = torch.stack([torch.ones_like(confidence), confidence, entropy, sure.double()]).sum(1)
    return torch.cat([sums, probs.sum(0)])


def read_signals(sums: Tensor) -> Tensor:
    """The signals `NAMES`, each from 0 to 1, of sums (..., 4 + classes); no images give zeros.

    Confidence, entropy and the share of sure images are means over images; diversity is the
    entropy of the mean prediction. Entropies are shares of the largest possible one.
    """
    sums = sums.double()
    classes = sums.shape[-1] - SUMS
    means = sums / sums[..., :1].clamp_min(torch.finfo(torch.float64).tiny)
    diversity = torch.special.entr(means[..., SUMS:]).sum(-1)
    most = math.log(classes) if classes > 1 else 1.0
    confidence, entropy, sure = means[..., 1], means[..., 2] / most, means[..., 3]
    return torch.stack([confidence, entropy, sure, diversity / most], -1)
