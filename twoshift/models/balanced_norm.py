"""Batch normalisation by statistics in which every class counts the same.

Su et al., "Towards real-world test-time adaptation: Tri-net self-training with balanced
normalization", AAAI 2024, https://arxiv.org/abs/2309.14949.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.models.norm import AnyBatchNorm, replace_batch_norms
from twoshift.models.statistics import image_statistics


class Votes(NamedTuple):
    """The labels of a batch, as all layers need them.

    Attributes:
        labels: The class of each image, (B,).
        pull: How far each image moves each class, (C, B): zero except for its own class.
        present: How many classes are in the batch.
    """

    labels: Tensor
    pull: Tensor
    present: int

    @classmethod
    def of(cls, labels: Tensor, classes: int, eta: float, dtype: torch.dtype) -> Votes:
        """A class moves by ``eta`` per image, together at most all the way to their mean."""
        one_hot = F.one_hot(labels, classes).T.to(dtype)
        counts = one_hot.sum(1, keepdim=True)
        step = counts.clamp_min(1).reciprocal_().clamp_max_(eta)
        return cls(labels, one_hot * step, int(counts.count_nonzero()))


class BalancedNorm(AnyBatchNorm):
    """Normalises by the mean over classes of the mean and variance that each class has.

    These are its running statistics. A pass with ``votes`` first moves those of the classes in the
    batch, and the running statistics with them; no gradient flows through the movement.

    Args:
        num_features: Number of channels.
        gamma: The part of what moves a class that moves all classes alike.
        kwargs: Of batch normalisation.

    Attributes:
        votes: The labels of the batch; None is evaluation mode.
        class_mean: Mean of each class, (C, channels).
        class_var: Variance of each class, (C, channels).
    """

    fixed_buffers = frozenset({"num_batches_tracked"})
    class_mean: Tensor
    class_var: Tensor

    def __init__(self, num_features: int, gamma: float = 0.0, **kwargs: Any) -> None:
        super().__init__(num_features, **kwargs)
        self.gamma = gamma
        self.votes: Votes | None = None

    def start(self, classes: int) -> None:
        """Let every class have the running statistics."""
        for name, statistic in zip(("class_mean", "class_var"), self.statistics(), strict=True):
            wide = torch.promote_types(statistic.dtype, torch.float32)  # small steps add up
            self.register_buffer(name, statistic.to(wide).repeat(classes, 1))

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and variance that it normalises by."""
        assert self.running_mean is not None
        assert self.running_var is not None
        return self.running_mean, self.running_var

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` of shape (B, C, ...)."""
        self._check_input_dim(input)
        mean, var = self.statistics() if self.votes is None else self._moved(input, self.votes)
        return F.batch_norm(input, mean, var, self.weight, self.bias, eps=self.eps)

    @torch.no_grad()
    def _moved(self, input: Tensor, votes: Votes) -> tuple[Tensor, Tensor]:
        """The statistics after a step; new tensors, so that a later step spoils no gradient."""
        mean, var = image_statistics(input.detach().to(self.class_mean.dtype))
        change = mean - self.class_mean[votes.labels]
        step = votes.pull @ change
        spread = votes.pull @ (var + change.square())
        spread = spread - votes.pull.sum(1, keepdim=True) * self.class_var - step.square()
        for statistic, own in ((self.class_mean, step), (self.class_var, spread)):
            statistic.add_(own, alpha=1 - self.gamma)
            if self.gamma:  # classes that are not in the batch have moved by nothing
                statistic.add_(own.sum(0) / votes.present, alpha=self.gamma)
        self.class_var.clamp_min_(0)  # what moves all classes may be more than one of them has
        mean, var = self.class_mean.mean(0), self.class_var.mean(0)
        if (classes := len(self.class_mean)) > 1:
            var.add_((self.class_mean - mean).square_().sum(0), alpha=1 / (classes - 1))
        running_mean, running_var = self.statistics()
        mean, var = mean.to(running_mean.dtype), var.to(running_var.dtype)
        running_mean.copy_(mean)
        running_var.copy_(var)
        return mean, var


def use_balanced_statistics(model: nn.Module, classes: int, gamma: float) -> list[BalancedNorm]:
    """Make all batch normalisation in ``model`` balanced, in place; return the new layers."""
    layers = replace_batch_norms(model, partial(BalancedNorm, gamma=gamma))
    for layer in layers:
        layer.start(classes)
    return layers


@contextmanager
def moving(layers: Sequence[BalancedNorm], labels: Tensor, eta: float) -> Iterator[None]:
    """Let the layers move towards what they see within the block.

    Args:
        layers: The layers.
        labels: The class of each image that they will see.
        eta: How far one image moves the statistics of its class.
    """
    like = layers[0].class_mean
    votes = Votes.of(labels, len(like), eta, like.dtype)
    try:
        for layer in layers:
            layer.votes = votes
        yield
    finally:
        for layer in layers:
            layer.votes = None
