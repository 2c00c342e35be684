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


def _model(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: models.create(name, classes=CLASSES, **settings)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet_bn": _model("resnet18_cifar", width=4, norm="bn"),
    "resnet_iabn": _model("resnet18_cifar", width=4, norm="iabn"),
    "resnet_gn": _model("resnet18_cifar", width=4, norm="gn"),
    "vit": _model("vit_cifar", width=8, blocks=2, heads=2),
    "convnext": _model("convnext_cifar", width=4, blocks=1, kernel=3),
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
