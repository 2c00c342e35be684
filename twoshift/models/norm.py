"""Normalisation layers: IABN, and batch norms that differ in the statistics they use.

Instance-aware batch normalisation (IABN): Gong et al., "NOTE: Robust continual test-time
adaptation against temporal correlation", NeurIPS 2022, https://arxiv.org/abs/2208.05117.

Every layer has the parameter and buffer names of ``torch.nn.BatchNorm2d``, so that a checkpoint
fits all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized

from twoshift.errors import ModelError
from twoshift.models._iabn import InstanceAware
from twoshift.models.base import expand
from twoshift.models.statistics import batch_statistics
from twoshift.registry import check_choice, check_numbers

Norm = Callable[[int], nn.Module]  # from a number of channels to a layer
N = TypeVar("N", bound=_BatchNorm)
HOOKS = (  # of a module, by kind
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
NORMS: tuple[type[nn.Module], ...] = (_BatchNorm, nn.GroupNorm, nn.LayerNorm, _InstanceNorm)


class AnyBatchNorm(_BatchNorm):
    """Base of the batch norms below: takes input (B, C, ...) of any number of dimensions.

    Attributes:
        fixed_buffers: Names of its buffers that never move, so that no state needs to hold them.
    """

    fixed_buffers: frozenset[str] = frozenset()

    def _check_input_dim(self, input: Tensor) -> None:  # called by torch
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")


class InstanceAwareBatchNorm(AnyBatchNorm):
    """Batch normalisation that adapts to a sample whose own statistics stand out.

    The reference statistics (the batch's in training mode, the running ones in evaluation mode)
    are corrected, per sample and channel, by the amount that the instance statistics deviate beyond
    ``k`` standard errors. In training mode the running statistics move with ``momentum``, unless
    ``track_running_stats`` is off. A channel with a single position has no instance statistics:
    it is normalised by the reference. A batch with a single value per channel has no variance
    either: it is normalised by the running statistics, which do not change.

    Args:
        num_features: Number of channels.
        k: Width of the soft shrinkage; infinity makes it plain batch normalisation.
        eps: Constant that is added to variances.
        momentum: Weight of the newest batch in the running statistics.
    """

    def __init__(
        self, num_features: int, k: float = 4.0, eps: float = 1e-5, momentum: float = 0.1
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum)
        self.k = k

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` of shape (B, C, ...)."""
        self._check_input_dim(input)
        use_batch = self.training and input.numel() > input.shape[1]
        use_running = self.running_mean is not None and not use_batch
        reference = (self.running_mean, self.running_var) if use_running else None
        output, mean, var = InstanceAware.apply(
            input, self.weight, self.bias, reference, float(self.k), float(self.eps)
        )
        if use_batch and self.track_running_stats:
            self._move_running_statistics(mean, var)
        return output

    @torch.no_grad()
    def _move_running_statistics(self, mean: Tensor, var: Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            assert running is not None
            running.lerp_(new.to(running.dtype), weight)

    def extra_repr(self) -> str:
        """Settings that ``print(model)`` shows."""
        return f"{super().extra_repr()}, k={self.k}"


def norm_maker(norm: str, k: float, eps: float = 1e-5) -> Norm:
    """A function from a number of channels to a normalisation layer.

    Args:
        norm: ``"bn"``, ``"iabn"`` or ``"gn"``.
        k: Width of IABN's soft shrinkage.
        eps: Constant that is added to variances.
    """
    makers: dict[str, Norm] = {
        "bn": lambda channels: nn.BatchNorm2d(channels, eps),
        "iabn": lambda channels: InstanceAwareBatchNorm(channels, k, eps),
        "gn": lambda channels: nn.GroupNorm(_groups(channels), channels, eps),
    }
    check_choice("the network", makers, norm=norm)
    return makers[norm]


def _groups(channels: int) -> int:
    """The largest number of groups, up to 32, that have two channels or more."""
    return next(g for g in range(min(32, channels // 2), 0, -1) if channels % g == 0)


class BatchStatNorm(AnyBatchNorm):
    """Batch normalisation by the batch's statistics; the running statistics do not change.

    A batch with a single value per channel (one vector, one position) has no variance: it is
    normalised by the running statistics.
    """

    fixed_buffers = STATISTICS

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` of shape (B, C, ...)."""
        self._check_input_dim(input)
        single = input.numel() == input.shape[1]
        mean, var = (self.running_mean, self.running_var) if single else (None, None)
        return F.batch_norm(input, mean, var, self.weight, self.bias, not single, 0, self.eps)


class MixedNorm(AnyBatchNorm):
    """Batch normalisation by a mix of the running statistics and the batch's.

    The running statistics do not change.

    Attributes:
        share: Weight of the batch's statistics in the mix; 0 is evaluation mode.
    """

    share: float = 0.0
    fixed_buffers = STATISTICS

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` of shape (B, C, ...)."""
        self._check_input_dim(input)
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, var = self.running_mean, self.running_var
        if self.share > 0 and input.numel() > input.shape[1]:
            batch_mean, batch_var = (s.to(mean.dtype) for s in self.statistics_of(input))
            mean, var = mean.lerp(batch_mean, self.share), var.lerp(batch_var, self.share)
        if not mean.requires_grad:
            return F.batch_norm(input, mean, var, self.weight, self.bias, False, 0, self.eps)
        scale = (var + self.eps).rsqrt()
        scale = scale * self.weight if self.affine else scale
        offset = -mean * scale + self.bias if self.affine else -mean * scale
        return input * expand(scale, input) + expand(offset, input)

    def statistics_of(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the batch, as they enter the mix."""
        return batch_statistics(input)


class MatchedNorm(MixedNorm):
    """Batch normalisation by the statistics that the batch would have with the labels of training.

    The batch is compared with source images of the same labels, not with all source images: the
    difference that remains is a change of appearance.

    Attributes:
        expected: Mean and variance of source images with the same labels as the batch,
            (2, channels).
    """

    expected: Tensor

    def statistics_of(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """The running statistics, shifted and scaled as the batch is relative to ``expected``."""
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, var = batch_statistics(input)
        expected_mean, expected_var = self.expected
        scale = ((var + self.eps) / (expected_var + self.eps)).sqrt()
        return mean + scale * (self.running_mean - expected_mean), scale**2 * self.running_var


def guard_group_norms(model: nn.Module) -> None:
    """Prevent a crash of torch: give every group norm in ``model`` an input with a gradient.

    On a CPU with channels last, the backward pass of a group norm kills the process if its weights
    require a gradient and its input does not (observed with torch 2.13).
    """
    for layer in model.modules():
        if isinstance(layer, nn.GroupNorm):
            layer.register_forward_pre_hook(_with_gradient)


def _with_gradient(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    (x,) = inputs
    learns = torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters())
    return (x.detach().requires_grad_(),) if learns and not x.requires_grad else None


def batch_norms(model: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Name and module of every batch-statistics layer: BatchNorm1d/2d/3d and IABN."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            yield name, module


@contextmanager
def in_training(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Put these layers into training mode within the block, and into evaluation mode after it."""
    layers = list(layers)
    try:
        for layer in layers:
            layer.train()
        yield
    finally:
        for layer in layers:
            layer.eval()


@contextmanager
def bounded_statistics(layers: Iterable[_BatchNorm], bound: float | None) -> Iterator[None]:
    """Bound how far a batch within the block moves the running statistics of these layers.

    The batch's mean counts as at most ``bound`` running standard deviations away from the running
    mean, and its standard deviation as at most 1 + ``bound`` times the running one, or its
    1 + ``bound``-th part. One batch of broken images then cannot ruin them.

    Args:
        layers: The layers, each of which moves once.
        bound: The bound; None for none, which changes no bit.
    """
    kept = [] if bound is None else [m for m in layers if m.running_mean is not None]
    before = [[s.clone() for s in (m.running_mean, m.running_var) if s is not None] for m in kept]
    yield
    for layer, (mean, var) in zip(kept, before, strict=True):
        assert bound is not None
        assert layer.running_mean is not None
        assert layer.running_var is not None
        after = layer.running_mean, layer.running_var
        within = bounded_step((mean, var), after, layer.momentum, bound, layer.eps)
        layer.running_mean.copy_(within[0])
        layer.running_var.copy_(within[1])


@torch.no_grad()
def bounded_step(
    before: tuple[Tensor, Tensor],
    after: tuple[Tensor, Tensor],
    momentum: float | None,
    bound: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Mean and variance after a step of a moving average, cut as `bounded_statistics` says.

    Args:
        before: Mean and variance before the step.
        after: Mean and variance after it, without a bound.
        momentum: Weight of the batch in the step.
        bound: The bound, in standard deviations.
        eps: What the layer adds to variances, so that a channel without any can move.
    """
    weight = 1.0 if momentum is None else momentum
    mean, spread = before[0], before[1] + eps
    reach, factor = weight * bound * spread.sqrt(), (1 + bound) ** 2
    least, most = (spread * (1 - weight + weight * f) - eps for f in (1 / factor, factor))
    return (
        torch.clamp(after[0], mean - reach, mean + reach),
        torch.clamp(after[1], least.clamp_min(0), most),
    )


def check_bound(owner: str, bound: float | None) -> float | None:
    """The setting ``bound`` of a method, or why it cannot be one."""
    if bound is not None:
        check_numbers(owner, "above 0", bound=bound)
    return bound


def use_batch_statistics(model: nn.Module) -> None:
    """Make every batch normalisation in ``model`` use the batch's statistics, in place.

    The running statistics are not used and do not change. IABN takes the batch as its reference.
    """
    for name, layer in list(batch_norms(model)):
        if isinstance(layer, BatchStatNorm):
            continue
        if is_plain(layer):
            replace_module(model, name, same_tensors(layer, BatchStatNorm))
        else:  # IABN, or a layer of another library that may do more than normalise
            layer.train()
            layer.track_running_stats = False
            if isinstance(layer, InstanceAwareBatchNorm):
                layer.fixed_buffers = STATISTICS


def fix_statistics(model: nn.Module) -> None:
    """Declare that the running statistics in ``model`` never move: no state needs to hold them."""
    for _, layer in batch_norms(model):
        setattr(layer, "fixed_buffers", STATISTICS)  # noqa: B010  torch types no such attribute


def use_iabn(model: nn.Module, k: float = 4.0) -> None:
    """Make all batch normalisation in ``model`` instance-aware, in place; it keeps its tensors."""
    for name, layer in list(batch_norms(model)):
        if not isinstance(layer, InstanceAwareBatchNorm):
            new = same_tensors(layer, partial(InstanceAwareBatchNorm, k=k))
            replace_module(model, name, new.train(layer.training))


def is_plain(layer: _BatchNorm) -> bool:
    """Whether ``layer`` does nothing but torch's own batch normalisation."""
    return type(layer).forward is _BatchNorm.forward and not is_parametrized(layer)


def replace_batch_norms(model: nn.Module, kind: Callable[..., N]) -> list[N]:
    """Replace every batch normalisation in ``model`` by one of another kind; return the new ones.

    They share the weights and statistics of the old ones.
    """
    new = {name: same_tensors(layer, kind) for name, layer in batch_norms(model)}
    for name, layer in new.items():
        replace_module(model, name, layer)
    return list(new.values())


def same_tensors(layer: _BatchNorm, kind: Callable[..., N]) -> N:
    """A layer of another kind that shares the weights and statistics of ``layer``."""
    if not is_plain(layer):  # some of timm's contain an activation, which would be lost
        raise ModelError(
            f"{type(layer).__name__} cannot be replaced: it may do more than normalise",
            must_be="torch's own batch normalisation",
            cure="Choose a method that does not replace layers, for example tent.",
        )
    return sharing(layer, kind).eval()


def sharing(layer: _BatchNorm, kind: Callable[..., N]) -> N:
    """A layer of another kind with the tensors, hooks and inner modules of ``layer``."""
    new = kind(layer.num_features, eps=layer.eps, momentum=layer.momentum)
    new.affine, new.weight, new.bias = layer.affine, layer.weight, layer.bias
    new.running_mean, new.running_var = layer.running_mean, layer.running_var
    new.num_batches_tracked = layer.num_batches_tracked
    keep_what_follows(layer, new)
    return new


def keep_what_follows(layer: nn.Module, new: nn.Module) -> None:
    """Give ``new`` the hooks of ``layer``, its activation among them, and the modules inside."""
    new._modules.update(layer._modules)
    for kind in HOOKS:
        getattr(new, kind).update(getattr(layer, kind))


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replace the submodule called ``name`` by ``new``, under all names that it has."""
    old = model.get_submodule(name)
    for alias, module in list(model.named_modules(remove_duplicate=False)):
        if module is old:
            parent, _, child = alias.rpartition(".")
            setattr(model.get_submodule(parent), child, new)


def has_iabn(model: nn.Module) -> bool:
    """Whether ``model`` has instance-aware batch normalisation."""
    return any(isinstance(layer, InstanceAwareBatchNorm) for layer in model.modules())
