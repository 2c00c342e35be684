"""Find any model's classifier head, and read the features that go into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from twoshift.errors import HeadError

USUAL_NAMES = ("fc", "classifier", "head")
CURE = "Name it: attach(model, adapter, head='path.to.linear')."


def find_head(model: nn.Module, name: str | None = None) -> tuple[str, nn.Module]:
    """The path and module of the classifier head of ``model``.

    Looked for in this order: ``name``; a head that an adapter is attached to; what
    ``get_classifier()`` returns; attributes called fc, classifier or head; the last linear layer.
    More than one candidate on a level is an error that lists them.
    """
    if name is not None:
        return name, _named(model, name)
    marked = [n for n, m in model.named_modules() if getattr(m, "is_classifier_head", False)]
    if not marked and callable(getter := getattr(model, "get_classifier", None)):
        wanted = getter()
        marked = [n for n, m in model.named_modules() if m is wanted and _last_linear(m)]
        marked = [_last_linear_path(model, n) for n in marked]
    if not marked:
        usual = [n for n in USUAL_NAMES if isinstance(getattr(model, n, None), nn.Module)]
        marked = [_last_linear_path(model, n) for n in usual if _last_linear(getattr(model, n))]
    if not marked and _last_linear(model):
        marked = [_last_linear_path(model, "")]
    if not marked:
        raise HeadError(
            f"no classifier head in {type(model).__name__}", must_be="a linear layer", cure=CURE
        )
    if len(marked) > 1:
        raise HeadError(
            f"{type(model).__name__} has several candidates for its head: {', '.join(marked)}",
            cure=CURE,
        )
    return marked[0], model.get_submodule(marked[0])


def _named(model: nn.Module, name: str) -> nn.Module:
    try:
        head = model.get_submodule(name)
    except AttributeError:
        linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        raise HeadError(
            f"{type(model).__name__} has no module {name!r}",
            cure=f"Its linear layers: {', '.join(linears) or 'none'}.",
        ) from None
    if not isinstance(head, nn.Linear) and not getattr(head, "is_classifier_head", False):
        raise HeadError(f"head {name!r}", must_be="an nn.Linear", got=type(head).__name__)
    return head


def _last_linear(module: nn.Module) -> str | None:
    linears = [n or "." for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    return linears[-1] if linears else None


def _last_linear_path(model: nn.Module, name: str) -> str:
    inner = _last_linear(model.get_submodule(name))
    assert inner is not None
    return name if inner == "." else f"{name}.{inner}" if name else inner


def class_count(model: nn.Module) -> int:
    """How many classes ``model`` tells apart."""
    head = find_head(model)[1]
    return int(head.out_features)  # type: ignore[arg-type]


@contextmanager
def capture_features(head: nn.Module) -> Iterator[list[Tensor]]:
    """Within the block, every forward pass appends what goes into ``head``."""
    captured: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _module, args: captured.append(args[0]))
    try:
        yield captured
    finally:
        handle.remove()


def features(model: nn.Module, x: Tensor, head: nn.Module | None = None) -> Tensor:
    """The features of ``x``: the input of the classifier head."""
    head = find_head(model)[1] if head is None else head
    with capture_features(head) as captured:
        model(x)
    if len(captured) != 1:
        raise HeadError("the head", must_be="used once in a forward pass", got=len(captured))
    return captured[0]


@torch.no_grad()
def reinitialise(head: nn.Module, generator: torch.Generator) -> None:
    """Fresh weights, drawn as torch draws them for a new linear layer."""
    assert isinstance(head, nn.Linear)
    bound = head.in_features**-0.5
    for parameter in head.parameters():
        parameter.uniform_(-bound, bound, generator=generator)
