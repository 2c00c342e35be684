"""Instance-aware batch normalisation (IABN) as a function: forward and backward pass.

Gong et al., "NOTE: Robust continual test-time adaptation against temporal correlation", NeurIPS
2022, https://arxiv.org/abs/2208.05117. The layer is `twoshift.models.norm.InstanceAwareBatchNorm`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from twoshift.models.base import expand


class InstanceAware(torch.autograd.Function):
    """IABN as one affine map per (sample, channel): y = scale * (x - instance mean) + offset.

    Only the (B, C) coefficients need autograd: the backward pass computes them again from the saved
    statistics, and passes over the activations in two reductions and one affine map. Autograd
    over the activations would take several times as long.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        reference: tuple[Tensor, Tensor] | None,
        k: float,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The normalised batch, and its mean and unbiased variance if ``reference`` is None."""
        spatial = tuple(range(2, x.dim()))
        positions = x[0, 0].numel()
        if positions > 1:
            mean = x.mean(spatial)
            centred = x - expand(mean, x)
            var = centred.square().sum(spatial) / (positions - 1)
        else:  # a single position is its own mean and has no variance
            mean = x.reshape(x.shape[0], x.shape[1])
            centred, var = torch.zeros_like(x), torch.zeros_like(mean)
        ctx.settings = (reference, positions, k, eps)
        ctx.save_for_backward(centred, mean, var, weight, bias)
        coefficients = _coefficients(mean, var, weight, bias, *ctx.settings)
        scale, offset, batch_mean, batch_var = coefficients
        ctx.mark_non_differentiable(batch_mean, batch_var)
        # two simple operations: addcmul with broadcasting is several times slower on a CPU
        output = (centred * expand(scale, x)).add_(expand(offset, x))
        return output, batch_mean, batch_var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients with respect to input, weight and bias."""
        centred, *inputs = ctx.saved_tensors
        spatial = tuple(range(2, centred.dim()))
        positions = centred[0, 0].numel()
        sums = (lambda t: t.sum(spatial)) if spatial else (lambda t: t)
        grad_offset, grad_scale = sums(grad), sums(grad * centred)
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in inputs if t is not None]
            mean, var, *affine = leaves
            weight, bias = affine or (None, None)
            scale, offset, *_ = _coefficients(mean, var, weight, bias, *ctx.settings)
            grad_mean, grad_var, *grad_affine = torch.autograd.grad(
                (scale, offset), leaves, (grad_scale, grad_offset), materialize_grads=True
            )
        grad_x = None
        if ctx.needs_input_grad[0]:
            # mean and centred = x - mean depend on x; so does var, through centred
            constant = (grad_mean - scale.detach() * grad_offset) / positions
            grad_x = (grad * expand(scale.detach(), grad)).add_(expand(constant, grad))
            if positions > 1:
                grad_x.add_(centred * expand(2 * grad_var / (positions - 1), grad))
        grad_weight, grad_bias = grad_affine or (None, None)
        return grad_x, grad_weight, grad_bias, None, None, None


def _coefficients(
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    reference: tuple[Tensor, Tensor] | None,
    positions: int,
    k: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scale and offset per (sample, channel), from instance statistics of shape (B, C).

    Also returns the mean and unbiased variance of the batch, computed from the instance statistics;
    with a ``reference`` they are not needed, and empty.
    """
    if reference is None:
        count = mean.shape[0] * positions
        batch_mean = mean.mean(0)
        within = var.sum(0) * (positions - 1)
        between = (mean - batch_mean).square().sum(0) * positions
        batch_var = (within + between) / max(count - 1, 1)
        centre, spread = batch_mean, batch_var
    else:
        centre, spread = reference
        batch_mean = batch_var = mean.new_empty(0)
    if positions > 1 and k < math.inf:  # an infinite k would make the gradient 0 * inf
        error_of_mean = ((spread + eps) / positions).sqrt()
        error_of_var = (spread + eps) * (2 / (positions - 1)) ** 0.5
        adjusted_mean = centre + _softshrink(mean - centre, k * error_of_mean)
        adjusted_var = (spread + _softshrink(var - spread, k * error_of_var)).relu()
    else:
        adjusted_mean, adjusted_var = centre.expand_as(mean), spread.expand_as(mean)
    scale = (adjusted_var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    offset = (mean - adjusted_mean) * scale
    if bias is not None:
        offset = offset + bias
    return scale, offset, batch_mean.detach(), batch_var.detach()


def _softshrink(deviation: Tensor, width: Tensor) -> Tensor:
    # not F.softshrink, whose width is a single number
    return deviation.sign() * (deviation.abs() - width).relu()
