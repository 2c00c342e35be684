"""Networks, batches and adapters for tests, and every method with settings that make it move."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twoshift import methods, models
from twoshift.adapters import attach
from twoshift.estimators import EMA
from twoshift.methods import LabelAware, Method
from twoshift.models.norm import batch_norms
from twoshift.registry import signature_settings
from twoshift.testing import (
    CLASSES,
    MLP,
    NETWORKS,
    make_adapter,
    make_network,
    networks,
    randomise,
    same,
    snapshot,
)

__all__ = [
    "CLASSES",
    "MLP",
    "make_adapter",
    "randomise",
    "same",
    "snapshot",
]  # of twoshift.testing

NETS = {**NETWORKS, "resnet_stem": lambda: models.create("resnet18", classes=CLASSES, width=4)}
SHAPES = {**networks.SHAPES, "resnet_stem": (3, 64, 64)}

# settings without a default, for methods that need facts about the source
REQUIRED: dict[str, dict[str, object]] = {
    "cotta": {"views": 2},
    "rotta": {"capacity": 6, "update_every": 4},
    "note": {"capacity": 6, "update_every": 4},
    "onda": {"update_every": 4},
    "eata": {"margin": 1.0, "redundancy": 1.0, "fisher_weight": 0.0},  # everything passes
    "sar": {"margin": 1.0},
    "hybrid_ttn": {"score": "classes"},  # the one with a state
    "dart": {"method": "tent", "method_settings": {"lr": 0.02}},
    "tribe": {"margin": 1.0},
}

WITH_MOMENTS = ("matched", "streamed", "hybrid_ttn")


def make_net(name: str, seed: int = 0) -> nn.Module:
    """A network with nothing at its initial value, in evaluation mode."""
    return make_network(NETS[name], seed)


def make_batches(net: str, sizes: tuple[int, ...] = (8, 5, 1, 7), seed: int = 1) -> list[Tensor]:
    """Images in [0, 1] whose brightness drifts, of the size that ``net`` takes."""
    return networks.make_batches(SHAPES.get(net, networks.SHAPE), sizes, seed)


def make_moments(net: nn.Module, seed: int = 3) -> dict[str, list[list[list[float]]]]:
    """Mean and variance of every class before each batch normalisation, at random."""
    g, moments = torch.Generator().manual_seed(seed), {}
    for name, layer in batch_norms(net):
        shape = (CLASSES, layer.num_features)
        means, variances = torch.randn(shape, generator=g), torch.rand(shape, generator=g) + 0.5
        moments[name] = torch.stack([0.3 * means, variances]).tolist()
    return moments


def make_dart(classes: int = CLASSES, hidden: int = 6, seed: int = 4) -> dict[str, Tensor]:
    """DART's network, at random: far from no refinement."""
    g, out = torch.Generator().manual_seed(seed), classes**2 + classes
    shapes = {
        "hidden_weight": (hidden, classes + 1),
        "hidden_bias": (hidden,),
        "out_weight": (out, hidden),
        "out_bias": (out,),
    }
    return {name: 0.4 * torch.randn(shape, generator=g) for name, shape in shapes.items()}


def large_steps(name: str, net: nn.Module) -> dict[str, object]:
    """Settings of the method called ``name`` under which every batch moves something."""
    lr = {"lr": 0.02} if "lr" in signature_settings(methods.methods[name]) else {}
    facts: dict[str, object] = {}
    if name in WITH_MOMENTS:
        facts = {"moments": make_moments(net)}
    elif name == "dart":
        facts = {"dart": make_dart()}
    return {**lr, **REQUIRED.get(name, {}), **facts}


def make_method(name: str, net: nn.Module, adapted: bool, **settings: object) -> Method:
    """The method called ``name``, with large steps; with an adapter and an estimate if wanted."""
    settings = {**large_steps(name, net), **settings}
    if not adapted:
        return methods.create(name, net, **settings)
    inner = methods.create(name, attach(net, make_adapter(net)), **settings)
    return LabelAware(inner, EMA(CLASSES, alpha=0.3))
