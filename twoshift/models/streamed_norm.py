"""Batch normalisation by the statistics of a stream, whatever the size of its batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from twoshift.models.norm import STATISTICS, AnyBatchNorm
from twoshift.models.statistics import fused_statistics, pooled

ROWS = ("mean", "floor", "slope", "base", "offset", "var", "still_mean", "still_var")
NUMBERS = ("keep", "move", "share")
STILL = 1 / 256  # a batch of less weight in the stream is normalised by the images before it


class Look:
    """How a layer normalises the next batch, and what it sees in it.

    All that does not need the batch is computed before, for the channels of all layers at once: a
    single image is mostly such small operations. With b and s, mean and variance of the batch, and
    t = s + keep (b - mean)^2, the layer normalises by

        a mean of base + move (b - mean) + offset sqrt(ratio) and a variance of var ratio^share,
        where ratio = floor + slope t: how much wider than expected the stream is, this batch
        included.

    A single image hardly moves the statistics of hundreds. They are then taken as they were before
    it, which leaves only its own statistics to be computed in the layer.

    Attributes:
        mean: Mean of the stream before this batch, (channels,), as are the next seven.
        keep: Weight of the past in the stream's statistics; 0 for the first batch. A tensor, as are
            the next two: a compiled network would be compiled again for another number.
        move: Weight of the batch in the mean to normalise by.
        share: Weight of the stream's statistics in the mix.
        still: Whether to normalise by ``still_mean`` and ``still_var``, whatever the batch.
        seen: Mean and variance of the batch, for each time that the layer was used.
    """

    __slots__ = (*ROWS, *NUMBERS, "seen", "still")
    mean: Tensor
    floor: Tensor
    slope: Tensor
    base: Tensor
    offset: Tensor
    var: Tensor
    still_mean: Tensor
    still_var: Tensor
    keep: Tensor
    move: Tensor
    share: Tensor

    def __init__(self, *tensors: Tensor) -> None:
        for name, tensor in zip((*ROWS, *NUMBERS), tensors, strict=True):
            setattr(self, name, tensor)
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.still = False

    def mixed(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance to normalise by."""
        batch_mean, batch_var = fused_statistics(input)
        if batch_mean.dtype != self.mean.dtype:
            batch_mean, batch_var = batch_mean.to(self.mean), batch_var.to(self.mean)
        self.seen.append((batch_mean, batch_var))
        if self.still:
            return self.still_mean, self.still_var
        change = batch_mean - self.mean
        spread = torch.addcmul(batch_var, change, change * self.keep)
        ratio = torch.addcmul(self.floor, spread, self.slope)
        mean = torch.addcmul(self.base, ratio.sqrt(), self.offset).addcmul_(change, self.move)
        var = ratio.pow_(self.share).mul_(self.var)
        return mean, var


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
        mean, var = self.running_mean, self.running_var
        if self.look is not None:  # the caller allows no gradients
            assert mean is not None
            mean, var = _as(mean.dtype, *self.look.mixed(input))
        weight, bias = self.weight, self.bias
        return torch.batch_norm(input, weight, bias, mean, var, False, 0.0, self.eps, False)


class Looks:
    """The looks of all layers: vectors over the channels of all of them, side by side.

    Args:
        layers: The layers.
        like: A tensor of the type and on the device to compute with.

    Attributes:
        told: Called with mean and variance of every batch that is followed; None for nobody.
    """

    told: Callable[[Tensor, Tensor], None] | None = None

    def __init__(self, layers: Sequence[StreamedNorm], like: Tensor) -> None:
        self.layers, self._sizes = layers, [layer.num_features for layer in layers]
        self._mean, var, self._eps = torch.cat([_source(n, like) for n in layers], 1).unbind()
        self._lengths = torch.tensor(self._sizes, device=like.device)
        rows = like.new_zeros(len(ROWS), sum(self._sizes))
        numbers = like.new_zeros(len(NUMBERS), len(layers))
        self._all = Look(*rows.unbind(), *numbers.unbind())
        self._all.var.copy_(var)
        by_layer = zip(rows.split(self._sizes, 1), numbers.unbind(1), strict=True)
        self._each = [Look(*part.unbind(), *own.unbind()) for part, own in by_layer]

    def fits(self, like: Tensor) -> bool:
        """Whether it computes with the type and on the device of a tensor.

        What was pickled never does: parts of a tensor come back as tensors of their own.
        """
        together = self._each[0].mean.data_ptr() == self._all.mean.data_ptr()
        return together and (self._mean.dtype, self._mean.device) == (like.dtype, like.device)

    def start(
        self, followed: Tensor, expected: Tensor, share_at: Callable[[float], float], step: float
    ) -> float:
        """Let the layers normalise the next batch so; the mean distance of layers from the source.

        The distance of a layer is how far the stream is from what is expected of it. Squared
        differences, means over its channels: of means, in standard deviations, and of logarithms of
        variances.

        Args:
            followed: Mean and variance of the stream so far, (2, all channels).
            expected: Those of source images with the same labels as the stream's, which it is
                compared with.
            share_at: Weight of the stream's statistics in the mix of a layer, by its distance.
            step: Weight of the batch in the stream's statistics; 1 for the first batch, where
                there is nothing to compare yet.
        """
        distance, still = self._mix(followed, expected, share_at, step), step < STILL
        for layer, look in zip(self.layers, self._each, strict=True):
            look.seen.clear()
            look.still = still
            if layer.look is not look:  # a module takes its time to set an attribute
                layer.look = look
        return distance

    def frozen(
        self, followed: Tensor, expected: Tensor, share_at: Callable[[float], float]
    ) -> list[tuple[Tensor, Tensor]]:
        """Mean and variance by which each layer normalises images that are not followed.

        Nothing changes for the layers. See `start` for the arguments.
        """
        self._mix(followed, expected, share_at, step=0.0)
        pairs = [(look.still_mean.clone(), look.still_var.clone()) for look in self._each]
        return [_as(_type(layer), *pair) for layer, pair in zip(self.layers, pairs, strict=True)]

    def _mix(
        self, followed: Tensor, expected: Tensor, share_at: Callable[[float], float], step: float
    ) -> float:
        """Compute what does not need the batch; the mean distance of layers from the source."""
        wide, distances = expected[1] + self._eps, [0.0] * len(self.layers)
        ratio = (followed[1] + self._eps).div_(wide)
        if step < 1:
            narrower, away = ratio.log(), (followed[0] - expected[0]).square_().div_(wide)
            each = away.addcmul_(narrower, narrower)
            distances = torch.segment_reduce(each, "mean", lengths=self._lengths).tolist()
        new, still = self._all, step < STILL
        new.share.copy_(new.share.new_tensor([share_at(distance) for distance in distances]))
        share = new.share.repeat_interleave(self._lengths)
        torch.lerp(self._mean, followed[0], share, out=new.base)
        torch.sub(self._mean, expected[0], out=new.offset).mul_(share)
        if still:
            torch.addcmul(new.base, new.offset, ratio.sqrt(), out=new.still_mean)
            torch.mul(new.var, ratio.pow_(share), out=new.still_var)
        else:
            new.mean.copy_(followed[0])
            new.keep.fill_(1 - step)
            torch.mul(new.share, step, out=new.move)
            inverse = wide.reciprocal_()
            torch.add(self._eps, followed[1], alpha=1 - step, out=new.floor).mul_(inverse)
            torch.mul(inverse, step, out=new.slope)
        return sum(distances) / len(distances)

    def pooled(self, otherwise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean and variance of what the layers saw since `start`, over all channels.

        Args:
            otherwise: Mean and variance for layers that were not used; the source's by default.
        """
        seen = [look.seen for look in self._each]
        if not all(seen):
            if otherwise is None:
                otherwise = torch.stack([self._mean, self._all.var])
            past = otherwise.split(self._sizes, 1)
            seen = [new or [(old[0], old[1])] for new, old in zip(seen, past, strict=True)]
        mean, var = (torch.cat(s) for s in zip(*map(_pooled, seen), strict=True))
        return mean, var

    def follow(self, followed: Tensor, step: float) -> None:
        """Move the stream's mean and variance by what the layers saw since `start`."""
        mean, var = followed
        batch_mean, batch_var = self.pooled(followed)  # to a layer that was not used, no news
        if self.told is not None:
            self.told(batch_mean, batch_var)
        # the pooled variance of two groups, of weights 1 - step and step
        change = batch_mean.sub_(mean)
        var.lerp_(batch_var.addcmul_(change, change, value=1 - step), step)
        mean.add_(change, alpha=step)
        self.forget()

    def forget(self) -> None:
        """Forget what the layers saw."""
        for look in self._each:
            look.seen.clear()


def _as(dtype: torch.dtype, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance in the type of a layer; in half precision, variances have a limit."""
    if mean.dtype == dtype:
        return mean, var
    return mean.to(dtype), var.clamp(max=torch.finfo(dtype).max).to(dtype)


def _type(layer: StreamedNorm) -> torch.dtype:
    """The type of a layer's statistics."""
    assert layer.running_mean is not None
    return layer.running_mean.dtype


def _source(layer: StreamedNorm, like: Tensor) -> Tensor:
    """Running mean and variance of a layer, and its eps, (3, channels)."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    mean, var = layer.running_mean.to(like), layer.running_var.to(like)
    return torch.stack([mean, var, torch.full_like(var, layer.eps)])


def _pooled(seen: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Mean and variance of everything that a layer saw, once or several times."""
    if len(seen) == 1:
        return seen[0]
    return pooled(*(torch.stack(each) for each in zip(*seen, strict=True)))
