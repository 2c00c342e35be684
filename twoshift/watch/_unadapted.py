"""The model as it was before a method adapted it, from the method itself."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from twoshift.adapters import adapted_heads, detach
from twoshift.calibration import Calibration
from twoshift.errors import MismatchError, ModelError, TwoshiftWarning
from twoshift.methods import LiveStream, Method
from twoshift.models.classifier import prepare
from twoshift.models.norm import (
    AnyBatchNorm,
    InstanceAwareBatchNorm,
    batch_norms,
    replace_module,
    sharing,
)

Live = Method | LiveStream[Method]


def method_of(live: Live) -> Method:
    """The method behind a live classifier or one of its streams."""
    if isinstance(live, LiveStream):
        return live._method
    if not isinstance(live, Method):
        raise ModelError(
            "what is watched",
            must_be="a method, such as recommended(...), or a stream of one",
            got=type(live).__name__,
        )
    return live


def unadapted(live: Live, facts: Calibration, model: nn.Module | None = None) -> nn.Module:
    """A frozen copy of the classifier as it was given: running statistics, no adapter.

    Args:
        live: A live classifier.
        facts: Its calibration, which knows the classifier again.
        model: The classifier itself, for methods that it cannot be taken from.
    """
    with torch.inference_mode(False), torch.no_grad():
        if model is None:
            network = _before(method_of(live))
        else:
            network = prepare(model, **(facts.classifier.prepared if facts.classifier else {}))
        network = network.eval().requires_grad_(False)
        if facts.classifier is not None:
            _check(network, facts)
    return network


def _before(method: Method) -> nn.Module:
    core = method._core
    network = detach(core.model) if any(adapted_heads(core.model)) else prepare(core.model)
    for name, layer in list(batch_norms(network)):
        if isinstance(layer, AnyBatchNorm) and not isinstance(layer, InstanceAwareBatchNorm):
            replace_module(network, name, sharing(layer, AnyBatchNorm))
    heads = {name: f"{name}.head" for name, _ in adapted_heads(core.model)}
    initial = {n.removeprefix("model."): t for n, t in core._initial.items()}
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        path, _, key = name.rpartition(".")
        before = initial.get(f"{heads.get(path, path)}.{key}" if path else key)
        if before is not None:
            tensor.copy_(before)
    return network


def _check(network: nn.Module, facts: Calibration) -> None:
    assert facts.classifier is not None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TwoshiftWarning)  # said when the method was built
            facts.classifier.check(network)
    except MismatchError as e:
        raise MismatchError(
            "the facts belong to another model than the one that is watched",
            cure="Calibrate this one; or pass the classifier as it was: model=classifier.",
        ) from e
