"""Small networks, images and adapters on which a method can be tried in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from twoshift import models
from twoshift.adapters import Adapter, LabelShiftAdapter
from twoshift.models.head import class_count, find_head
from twoshift.models.norm import NORMS

A = TypeVar("A", bound=Adapter)
CLASSES = 5
SHAPE = (3, 16, 16)


class SmallViT(nn.Module):
    """Patches, two attention blocks with LayerNorm, mean pooling; takes 16 x 16 images only.

    Args:
        size: Length of a token.
        patch: Edge of a patch in pixels.
    """

    def __init__(self, size: int = 8, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (16 // patch) ** 2, size) * 0.1)
        self.blocks = nn.Sequential(_Block(size), _Block(size))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits


class _Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.project = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        attention = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.project(attention @ v)
        return x + self.mlp(self.norm2(x))


class MLP(nn.Module):
    """Flattened 8 x 8 images, BatchNorm1d, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(),
            nn.Linear(3 * 8 * 8, 12),
            nn.BatchNorm1d(12),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(12, 12),
            nn.BatchNorm1d(12),
            nn.ReLU(),
        )
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.body(x))
        return logits


def _resnet(norm: str) -> nn.Module:
    return models.create("resnet18_cifar", classes=CLASSES, width=4, norm=norm)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet_bn": lambda: _resnet("bn"),
    "resnet_iabn": lambda: _resnet("iabn"),
    "resnet_gn": lambda: _resnet("gn"),
    "vit": SmallViT,
    "mlp": MLP,
}
SHAPES = {"mlp": (3, 8, 8)}  # of an image, where it is not SHAPE


def make_network(network: str | Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A network with random weights and statistics, none at its initial value, ready to predict.

    Args:
        network: A name in `NETWORKS`, or a function that builds a network.
        seed: Decides all random values.
    """
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        net = NETWORKS[network]() if isinstance(network, str) else network()
        for layer in net.modules():
            if isinstance(layer, NORMS):
                _randomise_norm(layer)
        for parameter in find_head(net)[1].parameters():
            parameter.mul_(3)  # confident enough for entropy to have a slope
    return net.eval()


def _randomise_norm(layer: Any) -> None:
    if layer.weight is not None:
        layer.weight.uniform_(0.5, 1.5)
        layer.bias.normal_(0, 0.2)
    if getattr(layer, "running_mean", None) is not None:
        layer.running_mean.normal_(0, 0.3)
        layer.running_var.uniform_(0.5, 2)


def make_batches(
    shape: Sequence[int] = SHAPE, sizes: Sequence[int] = (8, 5, 1, 7), seed: int = 1
) -> list[Tensor]:
    """Random images in [0, 1] whose brightness drifts.

    Args:
        shape: Of one image.
        sizes: Number of images in each batch.
        seed: Decides the pixels.
    """
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(b, *shape, generator=g) * (0.5 + 0.1 * (i % 5)) for i, b in enumerate(sizes)]


def make_adapter(model: nn.Module, seed: int = 2, **settings: Any) -> LabelShiftAdapter:
    """An adapter for ``model`` with random weights, so that it is far from the identity.

    Args:
        model: The classifier.
        seed: Decides the weights.
        **settings: Of `LabelShiftAdapter`.
    """
    features = int(find_head(model)[1].in_features)  # type: ignore[arg-type]
    with torch.random.fork_rng():  # a new linear layer draws from the global generator
        adapter = LabelShiftAdapter(features, class_count(model), **{"hidden": 7, **settings})
    return randomise(adapter, seed)


@torch.no_grad()
def randomise(adapter: A, seed: int = 2) -> A:
    """Give every parameter of an adapter a random value."""
    g = torch.Generator().manual_seed(seed)
    for parameter in adapter.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.4)
    return adapter.eval()
