"""Find the classifier head of any model, and read the features that go into it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from twoshift.errors import HeadError

USUAL_NAMES = ("fc", "classifier", "head")


def find_head(model: nn.Module, name: str | None = None) -> tuple[str, nn.Module]:
    """Path and module of the classifier head of ``model``.

    The search goes in this order: ``name``; a head with an adapter attached; the result of
    ``get_classifier()``; attributes called fc, classifier or head; the last linear layer. Several
    candidates at one of these steps are an error that lists them.
    """
    if name is not None:
        return name, _named(model, name)
    heads = [n for n, m in model.named_modules() if getattr(m, "is_classifier_head", False)]
    if not heads and callable(get_classifier := getattr(model, "get_classifier", None)):
        classifier = get_classifier()
        heads = _last_linears(model, [n for n, m in model.named_modules() if m is classifier])
    usual = [n for n in USUAL_NAMES if isinstance(getattr(model, n, None), nn.Module)]
    heads = heads or _last_linears(model, usual) or _last_linears(model, [""])
    if not heads:
        what = f"no classifier head in {type(model).__name__}: it has no linear layer"
        raise HeadError(what, cure="Use a model that ends in an nn.Linear.")
    if len(heads) > 1:
        what = f"{type(model).__name__} has several candidates for its head: {', '.join(heads)}"
        raise HeadError(what, cure="Name it: attach(model, adapter, head='path.to.linear').")
    return heads[0], model.get_submodule(heads[0])


def _named(model: nn.Module, name: str) -> nn.Module:
    try:
        head = model.get_submodule(name)
    except AttributeError:
        linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        cure = f"Its linear layers: {', '.join(linears) or 'none'}."
        raise HeadError(f"{type(model).__name__} has no module {name!r}", cure=cure) from None
    if not isinstance(head, nn.Linear) and not getattr(head, "is_classifier_head", False):
        raise HeadError(f"head {name!r}", must_be="an nn.Linear", got=type(head).__name__)
    return head


def _last_linears(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Path of the last linear layer in each of the named modules that has one."""
    paths: list[str] = []
    for name in names:
        inside = model.get_submodule(name).named_modules(prefix=name)
        paths += [path for path, module in inside if isinstance(module, nn.Linear)][-1:]
    return paths


def class_count(model: nn.Module) -> int:
    """Number of classes of ``model``."""
    return int(find_head(model)[1].out_features)  # type: ignore[arg-type]


@contextmanager
def capture_features(head: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list to which every forward pass in the block appends the input of ``head``."""
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
        raise HeadError("head", must_be="used once in a forward pass", got=len(captured))
    return captured[0]


@torch.no_grad()
def reinitialise(head: nn.Module, generator: torch.Generator) -> None:
    """Draw new weights, as torch does for a new linear layer."""
    assert isinstance(head, nn.Linear)
    bound = head.in_features**-0.5
    for parameter in head.parameters():
        parameter.uniform_(-bound, bound, generator=generator)
