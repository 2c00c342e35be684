"""Backbones, normalisation layers and classifier heads."""

from typing import Any

from torch import nn

from twoshift.models import hub, weights
from twoshift.models.base import models

__all__ = ["create", "models"]


def create(name: str, *, pretrained: bool = False, **settings: Any) -> nn.Module:
    """Build a backbone: ``create("resnet18_cifar", classes=10, width=16, norm="iabn")``.

    Args:
        name: Registered name, ``timm:NAME`` or ``hf:NAME``.
        pretrained: Whether to load the weights that the backbone's package provides.
        settings: Settings of the backbone; ``twoshift ls models`` lists them.
    """
    model = hub.create(name, **settings) if ":" in name else models.create(name, **settings)
    if pretrained:
        weights.load_weights(model, weights.PACKAGE)
    return model
