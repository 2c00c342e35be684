"""UnMix-TNS: every image is normalised by a mix of its own statistics and several of the stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.errors import ModelError
from twoshift.methods.base import Method, check_finite, methods
from twoshift.methods.bn_stats import require_plain_batch_norm
from twoshift.models.base import expand
from twoshift.models.norm import (
    AnyBatchNorm,
    batch_norms,
    fix_statistics,
    replace_module,
    same_tensors,
)
from twoshift.models.statistics import image_statistics
from twoshift.registry import check_numbers


@methods.register("unmix_tns")
class UnMixTNS(Method):
    """Normalise every image by components of the stream's statistics, mixed with its own.

    Each layer keeps several means and variances, which start around the running ones. An image is
    mixed into the components that its means point to, all of them normalise it, and they move a
    little towards it. No parameter moves. `torch.nn.BatchNorm1d` keeps the running statistics.

    Args:
        model: The classifier, with batch normalisation of images.
        components: Components of every layer.
        alpha: Share of the running variance that is, at the start, between the components.
        near_temperature: Of the softmax over cosines by which images are near to components.
        momentum_batch: Images that move the components by the momentum of the layer.
        seed: Seed of the first components.
    """

    title = "UnMix-TNS"
    reference = (
        "Tomar et al., Un-mixing test-time normalization statistics: combatting label temporal "
        "correlation, ICLR 2024, https://arxiv.org/abs/2401.08328"
    )

    def __init__(
        self,
        model: nn.Module,
        components: int = 16,
        alpha: float = 0.5,
        near_temperature: float = 0.07,
        momentum_batch: float = 64.0,
        seed: int = 0,
    ) -> None:
        super().__init__(model)
        check_numbers("unmix_tns", "a whole number from 2", components=components)
        check_numbers("unmix_tns", "from 0 to 1", alpha=alpha)
        positive = {"near_temperature": near_temperature, "momentum_batch": momentum_batch}
        check_numbers("unmix_tns", "above 0 and finite", **positive)
        check_numbers("unmix_tns", "a whole number from 0", seed=seed)
        require_plain_batch_norm(model, "unmix_tns")
        self.components, self.alpha, self.seed = components, alpha, seed
        self.near_temperature, self.momentum_batch = near_temperature, momentum_batch
        self.generator.manual_seed(seed)
        self._layers = []
        for name, layer in _of_images(self.model):
            new = same_tensors(layer, UnmixedNorm)
            new.temperature, new.momentum_batch = near_temperature, momentum_batch
            new.spread(components, alpha, self.generator)
            replace_module(self.model, name, new)
            self._layers.append(new)
        fix_statistics(self.model)
        self.ready()

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Scores:
        """Predict; the components of every layer move on the way."""
        scores = self.predict(x)
        sizes = torch._foreach_norm([layer.component_var for layer in self._layers])
        check_finite("the statistics", torch.stack(sizes))  # infinite ones would stay so
        return scores


def _of_images(model: nn.Module) -> list[tuple[str, nn.modules.batchnorm._BatchNorm]]:
    """The layers to replace: all but BatchNorm1d."""
    layers = [(n, m) for n, m in batch_norms(model) if not isinstance(m, nn.BatchNorm1d)]
    if not layers:
        raise ModelError(
            f"batch normalisation layers of images in {type(model).__name__} for unmix_tns",
            must_be="at least one: others keep the running statistics",
            got="only BatchNorm1d",
            cure="Use matched or streamed.",
        )
    for name, layer in layers:
        if layer.momentum is None or not 0 <= layer.momentum <= 1:
            raise ModelError(
                f"momentum of batch normalisation {name!r} for unmix_tns",
                must_be="from 0 to 1",
                got=layer.momentum,
                cure="Set it, for example to 0.1.",
            )
    return layers


class UnmixedNorm(AnyBatchNorm):
    """Batch normalisation of every image by components of statistics, which move.

    Input without positions, (B, C), is normalised by the running statistics, which do not move.

    Attributes:
        temperature: Of the softmax by which images are assigned to components.
        momentum_batch: Images that move the components by ``momentum``.
        component_mean: Means, (components, channels).
        component_var: Variances, (components, channels).
    """

    temperature: float
    momentum_batch: float
    component_mean: Tensor
    component_var: Tensor

    @torch.inference_mode(False)  # buffers that can be written later
    @torch.no_grad()
    def spread(self, components: int, alpha: float, generator: torch.Generator) -> None:
        """Start the components: around the running mean, with the rest of the running variance."""
        assert self.running_mean is not None
        assert self.running_var is not None
        wide = torch.promote_types(self.running_mean.dtype, torch.float32)
        mean, var = self.running_mean.to(wide), self.running_var.to(wide)
        draws = torch.randn(components, self.num_features, generator=generator).to(mean)
        std = (alpha * components / (components - 1) * var).sqrt()
        self.register_buffer("component_mean", mean + std * draws)
        self.register_buffer("component_var", ((1 - alpha) * var).repeat(components, 1))

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` of shape (B, C, ...), and move the components."""
        self._check_input_dim(input)
        if input.dim() == 2:
            return super().forward(input)
        mean, var = (s.to(self.component_mean.dtype) for s in image_statistics(input))
        directions = F.normalize(mean), F.normalize(self.component_mean)
        near = (directions[0] @ directions[1].T / self.temperature).softmax(1)
        mixed_mean, mixed_var = self._mixed(mean, var, near)
        self._move(mean, var, near)
        scale = (mixed_var + self.eps).rsqrt()
        scale = scale * self.weight if self.affine else scale
        offset = -mixed_mean * scale
        offset = offset + self.bias if self.affine else offset
        # addcmul with broadcasting is slower on a CPU unless channels are last
        return (input * expand(scale, input)).add_(expand(offset, input)).to(input.dtype)

    def _mixed(self, mean: Tensor, var: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance, (B, C), of all components after an image is mixed into each.

        Component k becomes (1 - near) of itself and ``near`` of the image. Sums over components
        are matrix products, and ``near`` sums to one.
        """
        count, away = len(self.component_mean), 1 - near
        centre = self.component_mean.mean(0)  # squares of what is left lose no digits
        means, own = self.component_mean - centre, mean - centre
        mixed = (away @ means + own) / count
        squares = (
            away.square() @ means.square()
            + 2 * own * ((near * away) @ means)
            + own.square() * near.square().sum(1, keepdim=True)
        ) / count
        between = (squares - mixed.square()).clamp(min=0)
        return centre + mixed, (away @ self.component_var + var) / count + between

    def _move(self, mean: Tensor, var: Tensor, near: Tensor) -> None:
        """Move every component towards the images, by how near they are."""
        assert self.momentum is not None
        step = 1 - (1 - self.momentum) ** (len(mean) / self.momentum_batch)
        keep = 1 - step * near.mean(0)[:, None]
        for component, new in ((self.component_mean, mean), (self.component_var, var)):
            component.mul_(keep).addmm_(near.T, new, alpha=step / len(mean))
