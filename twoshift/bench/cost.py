"""What a network and its adapter cost: multiply-adds and parameters; how long cells will take."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from twoshift import methods, models
from twoshift.adapters import attach, create
from twoshift.bench.cell import NATURAL, Cell
from twoshift.data.schedules import Schedule, named
from twoshift.models.head import find_head
from twoshift.registry import signature_settings
from twoshift.train.recipes import AdapterRecipe

COLUMNS = ("MACs", "Params")
WITH_GRADIENT = 3  # a forward and a backward pass, in forward passes
# test images, classes, side in pixels: known before a data set is here
TEST_SETS = {
    "cifar10": (10_000, 10, 32),
    "cifar10_outside": (6_000, 10, 32),
    "cifar100": (10_000, 100, 32),
    "cifar100_outside": (6_000, 100, 32),
    "digits8x8": (540, 10, 8),
    "mnist5k": (2_000, 10, 28),
    "imagenet_c": (50_000, 1000, 224),
    "imagenet_lt": (50_000, 1000, 224),
    "visda_c": (13_400, 12, 224),
    "office_home": (1_500, 65, 224),
    "domainnet": (5_000, 40, 224),
    "pacs": (2_500, 7, 224),
}
OTHERS = (10_000, 10, 224)


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
            name, chosen = AdapterRecipe.model_validate({"adapter": adapter}).named_adapter
            net = attach(net, create(name, head.in_features, head.out_features, **chosen))
    net.eval()
    with torch.no_grad():
        macs = count_macs(lambda: net(torch.zeros(1, settings.get("channels", 3), size, size)))
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


class Estimate(NamedTuple):
    """How long cells will take, without the training of models.

    Attributes:
        seconds: The estimate, for one cell at a time.
        known: Number of cells whose method has been timed before.
        counted: Number of cells whose multiply-adds were counted instead.
        left_out: Number of cells of networks from other libraries, which are not counted.
    """

    seconds: float
    known: int
    counted: int
    left_out: int


def estimate(
    cells: Sequence[Cell], timed: Mapping[tuple[str, str | None], float] | None = None
) -> Estimate:
    """How long cells will take, one after the other.

    A cell takes as long as others of its method and adapter did. Where there are none, the
    multiply-adds of its passes are counted, and this machine is timed on one network.

    Args:
        cells: The cells.
        timed: Mean seconds of a cell, by method and adapter; `Store.seconds`.
    """
    timed = timed or {}
    known = [seconds for c in cells if (seconds := timed.get((c.method, c.adapter))) is not None]
    unknown = [c for c in cells if (c.method, c.adapter) not in timed]
    ours = [c for c in unknown if ":" not in _network(c)[0]]
    seconds = sum(known)
    if ours:
        seconds += sum(map(_work, ours)) / _macs_per_second(*_network(ours[0]))
    return Estimate(seconds, len(known), len(ours), len(unknown) - len(ours))


def _work(cell: Cell) -> float:
    """Multiply-adds of a cell, roughly: images times passes; a gradient costs two passes."""
    settings = {**signature_settings(methods.methods[cell.method]), **cell.settings}
    passes = (WITH_GRADIENT if "lr" in settings else 1) + settings.get("views", 0)
    return _images(cell) * passes * _macs(*_network(cell))


def _images(cell: Cell) -> float:
    """Images of a stream, if the test set has equally many of each class."""
    images: float
    images, classes, _ = _test_set(cell)
    if cell.labels != NATURAL:
        target = named(cell.labels, classes, seed=cell.seed)
        shares = target.mean if isinstance(target, Schedule) else target
        images = images / classes / shares.max()
    return images if cell.images is None else min(images, cell.images)


def _test_set(cell: Cell) -> tuple[int, int, int]:
    assert cell.model is not None
    name = cell.target or cell.model.source["dataset"]
    return TEST_SETS.get(name.partition(":")[0], OTHERS)


def _network(cell: Cell) -> tuple[str, str, int]:
    """Architecture, settings as text, and side of the images of a cell."""
    assert cell.model is not None
    recipe = cell.model.source
    side = (recipe.get("decoding") or {}).get("size", _test_set(cell)[2])
    return recipe["architecture"], json.dumps(recipe["settings"]), side


@cache
def _macs(architecture: str, settings: str, side: int) -> float:
    return cost(architecture, json.loads(settings), 10, side).macs


@cache
def _macs_per_second(architecture: str, settings: str, side: int) -> float:
    """The speed of this CPU, on a batch of zeros."""
    chosen, batch = json.loads(settings), 64 if side <= 64 else 4
    with torch.random.fork_rng(), torch.no_grad():
        net = models.create(architecture, **{"classes": 10, **chosen}).eval()
        x = torch.zeros(batch, chosen.get("channels", 3), side, side)
        net(x)  # the first pass is slower
        start = time.perf_counter()
        net(x)
        seconds = time.perf_counter() - start
    return batch * _macs(architecture, settings, side) / seconds
