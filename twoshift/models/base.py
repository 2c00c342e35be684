"""The registry of backbones, the normalisation of their input, and per-channel arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from twoshift.errors import SettingError
from twoshift.registry import Registry

models: Registry[Callable[..., nn.Module]] = Registry("model", "twoshift.models")

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Normalize(nn.Module):
    """(x - mean) / std per channel.

    Mean and std are settings of the model, saved in its card. They are not in its ``state_dict``,
    whose names are therefore the same as in other libraries.
    """

    mean: Tensor
    std: Tensor
    fixed_buffers = frozenset({"mean", "std"})  # no state holds them

    def __init__(self, mean: Sequence[float], std: Sequence[float], channels: int) -> None:
        super().__init__()
        if len(mean) != channels or len(std) != channels:
            must_be = f"{channels} values each"
            raise SettingError("mean and std of the input", must_be=must_be, got=(mean, std))
        if min(std) <= 0:
            raise SettingError("std of the input", must_be="positive", got=std)
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise images in [0, 1]."""
        return (x - self.mean) / self.std


def expand(per_channel: Tensor, like: Tensor) -> Tensor:
    """Append dimensions of one, so that (C,) or (B, C) fits ``like`` of shape (B, C, ...)."""
    return per_channel.reshape(*per_channel.shape, *[1] * (like.dim() - 2))
