"""Backbones, normalisation layers and classifier heads."""

from typing import Any

from torch import nn

from twoshift.models import hub, weights
from twoshift.models.base import models

__all__ = ["create", "models"]


def create(name: str, *, pretrained: bool = False, **settings: Any) -> nn.Module:
    """Build a backbone: ``create("resnet18_cifar", classes=10, width=16, norm="iabn")``.

    Args:
        name: A registered one, ``timm:NAME`` or ``hf:NAME``.
        pretrained: Take the weights that the backbone's package brings.
        settings: Of the backbone; ``twoshift ls models`` lists them.
    """
    model = hub.create(name, **settings) if ":" in name else models.create(name, **settings)
    if pretrained:
        weights.load_weights(model, weights.PACKAGE)
    return model
