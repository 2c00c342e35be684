"""Backbones, normalisation layers and classifier heads."""

from typing import Any

from torch import nn

from twoshift.models.base import models

__all__ = ["create", "models"]


def create(name: str, **settings: Any) -> nn.Module:
    """Build a backbone: ``create("resnet18_cifar", classes=10, width=16, norm="iabn")``."""
    return models.create(name, **settings)
