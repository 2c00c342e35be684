"""Comparisons bit for bit, and what they say where something differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twoshift.methods._streams import LiveStream
from twoshift.methods.base import Method
from twoshift.testing._case import MethodCase


def require(kept: bool, promise: str) -> None:
    """Raise an AssertionError with the promise unless it is kept; also under ``python -O``."""
    if not kept:
        raise AssertionError(promise)


def require_same_logits(logits: Sequence[Tensor], expected: Sequence[Tensor], promise: str) -> None:
    """Require equal logits, batch by batch."""
    for i, (ours, theirs) in enumerate(zip(logits, expected, strict=True)):
        if ours.shape != theirs.shape:
            shapes = f"{tuple(ours.shape)} and {tuple(theirs.shape)}"
            raise AssertionError(f"{promise}; the shapes of batch {i} are {shapes}")
        if not torch.equal(ours, theirs):
            distance = float((ours - theirs).abs().max())
            raise AssertionError(f"{promise}; batch {i} differs by up to {distance:.2g}")


def require_same_state(
    live: Method | LiveStream[Any], expected: Mapping[str, Tensor], promise: str
) -> None:
    """Require that a method or stream is in a certain state."""
    names = different(live.state(), expected)
    require(not names, f"{promise}; differs in {', '.join(names[:5])}")


def require_same_run(
    case: MethodCase, live: Method, logits: Sequence[Tensor], circumstance: str
) -> None:
    """Require the logits and the final state of the plain run."""
    promise = f"{circumstance}, the logits must be the same"
    require_same_logits(logits, case.reference.logits, promise)
    promise = f"{circumstance}, the state after the stream must be the same"
    require_same_state(live, case.reference.states[-1], promise)


def different(a: Mapping[str, object], b: Mapping[str, object]) -> list[str]:
    """The names under which two dictionaries of tensors and plain values differ."""
    return [
        name
        for name in {**a, **b}
        if name not in a or name not in b or not _equal(a[name], b[name])
    ]


def same(a: Mapping[str, object], b: Mapping[str, object]) -> bool:
    """Whether two dictionaries of tensors and plain values are equal, bit for bit."""
    return not different(a, b)


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return same(a, b)
    return type(a) is type(b) and a == b


def snapshot(module: nn.Module) -> dict[str, object]:
    """Everything a caller can see of a module: tensors, gradients, modes, what is trained."""
    modes: dict[str, object] = {f"{n} training": m.training for n, m in module.named_modules()}
    parameters = dict(module.named_parameters())
    trained = {f"{n} requires_grad": p.requires_grad for n, p in parameters.items()}
    gradients = {f"{n} has grad": p.grad is not None for n, p in parameters.items()}
    tensors = {**parameters, **dict(module.named_buffers())}
    values = {n: t.detach().clone() for n, t in tensors.items()}
    return {**modes, **trained, **gradients, **values}
