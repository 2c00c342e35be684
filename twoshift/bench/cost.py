"""What a network and its adapter cost: multiply-adds per image and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from twoshift import models
from twoshift.adapters import attach, create
from twoshift.models.head import find_head
from twoshift.train.recipes import AdapterRecipe

COLUMNS = ("MACs", "Params")


class Cost(NamedTuple):
    """The cost of a network, counted, not measured.

    Attributes:
        macs: Multiply-adds of the prediction of one image, in matrix products and convolutions.
        parameters: Number of parameters of the network, including the adapter's.
    """

    macs: float
    parameters: int


def cost(
    architecture: str,
    settings: Mapping[str, Any],
    classes: int,
    size: int,
    adapter: Mapping[str, Any] | None = None,
) -> Cost:
    """Count multiply-adds and parameters of a network.

    Args:
        architecture: Registered backbone.
        settings: Settings of the backbone.
        classes: Number of classes.
        size: Side of the images, in pixels.
        adapter: Settings of the adapter; None attaches none.
    """
    with torch.random.fork_rng():  # counting must not change later random numbers
        net = models.create(architecture, classes=classes, **settings)
        if adapter is not None:
            head = find_head(net)[1]
            assert isinstance(head, nn.Linear)
            name, settings = AdapterRecipe.model_validate({"adapter": adapter}).named_adapter
            net = attach(net, create(name, head.in_features, head.out_features, **settings))
    net.eval()
    with torch.no_grad():
        macs = count_macs(lambda: net(torch.zeros(1, 3, size, size)))
    return Cost(macs, parameters(net))


def count_macs(run: Callable[[], object]) -> float:
    """Multiply-adds of matrix products and convolutions: half of torch's FLOPs."""
    # torch counts products of matrices, not of vectors
    of_vectors = {
        torch.ops.aten.mv: lambda matrix, *_, **__: 2 * matrix[0] * matrix[1],
        torch.ops.aten.dot: lambda vector, *_, **__: 2 * vector[0],
    }
    with FlopCounterMode(display=False, custom_mapping=of_vectors) as counter:
        run()
    return counter.get_total_flops() / 2


def parameters(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in module.parameters())
