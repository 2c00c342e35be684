"""Find the classifier head of any model, and read the features that go into it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from twoshift.errors import HeadError
from twoshift.models.classifier import prepare, unwrap

USUAL_NAMES = ("fc", "classifier", "head")


def find_head(model: nn.Module, name: str | None = None) -> tuple[str, nn.Module]:
    """Path and module of the classifier head of ``model``: a linear layer or a 1x1 convolution.

    The search goes in this order: ``name``; a head with an adapter attached; the result of
    ``get_classifier()``; attributes called fc, classifier or head; the last linear layer; a 1x1
    convolution with the last weights. Several candidates at one of these steps are an error that
    lists them; `trace_head` tells them apart.
    """
    model = unwrap(model)
    if name is not None:
        return name, _named(model, name)
    heads = head_candidates(model)
    if not heads:
        what = f"no classifier head in {type(model).__name__}: it has no linear layer"
        raise HeadError(what, cure="Use a model that ends in an nn.Linear or a 1x1 nn.Conv2d.")
    if len(heads) > 1:
        what = f"{type(model).__name__} has several candidates for its head: {', '.join(heads)}"
        cure = (
            "Name it: attach(model, adapter, head='path.to.linear'). "
            "trace_head(model, images) finds it."
        )
        raise HeadError(what, cure=cure)
    return heads[0], model.get_submodule(heads[0])


def head_candidates(model: nn.Module) -> list[str]:
    """Paths of the modules that may be the head, as far as their names tell."""
    modules = dict(model.named_modules())
    if adapted := [n for n, m in modules.items() if _is_adapted(m)]:
        return adapted
    if callable(get_classifier := getattr(model, "get_classifier", None)):
        classifier = get_classifier()
        inside = [n for n, m in modules.items() if m is classifier]
        if found := _last(model, inside, is_linear) or _last(model, inside, is_pointwise):
            return found
    usual = [n for n in USUAL_NAMES if isinstance(getattr(model, n, None), nn.Module)]
    found = _last(model, usual, is_linear) or _last(model, usual, is_pointwise)
    if found := found or _last(model, [""], is_linear):
        return found
    weighted = [n for n, m in modules.items() if any(True for _ in m.parameters(recurse=False))]
    if weighted and "" not in weighted and is_pointwise(modules[weighted[-1]]):
        return weighted[-1:]
    return [n for n, m in modules.items() if _is_answer(m)]


def _named(model: nn.Module, name: str) -> nn.Module:
    try:
        head = model.get_submodule(name)
    except AttributeError:
        layers = [n for n, m in model.named_modules() if _is_layer(m)]
        cure = f"Its linear layers: {', '.join(layers) or 'none'}."
        raise HeadError(f"{type(model).__name__} has no module {name!r}", cure=cure) from None
    if not _is_layer(head) and not getattr(head, "is_classifier_head", False):
        must_be = "an nn.Linear or a 1x1 nn.Conv2d"
        raise HeadError(f"head {name!r}", must_be=must_be, got=type(head).__name__)
    return head


def _last(model: nn.Module, names: Iterable[str], kind: Callable[[nn.Module], bool]) -> list[str]:
    """Path of the last layer of a kind in each of the named modules that has one."""
    paths: list[str] = []
    for name in names:
        inside = model.get_submodule(name).named_modules(prefix=name)
        paths += [path for path, module in inside if kind(module)][-1:]
    return paths


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer."""
    return isinstance(module, nn.Linear)


def is_pointwise(module: nn.Module) -> bool:
    """Whether ``module`` is a 1x1 convolution, which is a linear layer at every position."""
    if not isinstance(module, nn.Conv2d):
        return False
    alone = module.groups == 1 and module.padding in ((0, 0), "valid", "same")
    return alone and module.kernel_size == module.stride == (1, 1)


def _is_layer(module: nn.Module) -> bool:
    return is_linear(module) or is_pointwise(module)


def _is_adapted(module: nn.Module) -> bool:
    return getattr(module, "is_classifier_head", False) and not _is_answer(module)


def _is_answer(module: nn.Module) -> bool:  # an adapter behind the whole model
    return bool(getattr(module, "adapts_answer", False))


def size_of(head: nn.Module) -> tuple[int, int]:
    """Number of features and of classes of a head."""
    if isinstance(head, nn.Conv2d):
        return head.in_channels, head.out_channels
    return int(head.in_features), int(head.out_features)  # type: ignore[arg-type]


def class_count(model: nn.Module) -> int:
    """Number of classes of ``model``."""
    model = unwrap(model)
    adapted = [m for m in model.modules() if _is_adapted(m) or _is_answer(m)]
    heads = adapted or [model.get_submodule(path) for path in head_candidates(model)]
    counts = {size_of(head)[1] for head in heads}
    return counts.pop() if len(counts) == 1 else size_of(find_head(model)[1])[1]


@torch.no_grad()
def trace_head(model: nn.Module, x: Tensor) -> str | None:
    """Path of the layer whose output is the answer, found by a pass over the images ``x``.

    The answer of a 1x1 convolution may be the mean over its positions. An auxiliary or unused head
    is never returned. None if no layer's output is the answer, for example because it is scaled
    afterwards.
    """
    own = prepare(model).eval()
    x = x.to(next(own.parameters()).device)
    layers = {n: m for n, m in own.named_modules() if _is_layer(m) or _is_adapted(m)}
    outputs: list[tuple[str, Tensor]] = []

    def keep(name: str) -> Callable[..., None]:
        return lambda _layer, _inputs, output: outputs.append((name, output))

    handles = [layer.register_forward_hook(keep(name)) for name, layer in layers.items()]
    answer = own(x)
    for handle in handles:
        handle.remove()
    calls = Counter(name for name, _ in outputs)
    for name, output in reversed(outputs):  # the head is among the last
        layer = layers[name]
        same = calls[name] == 1 and _is_the_answer(layer, output, answer)
        if same and _decides(own, layer, x, answer):
            return name
    return None


def _is_the_answer(layer: nn.Module, output: Tensor, answer: Tensor) -> bool:
    mean = over_positions(layer, output)
    if mean.shape != output.shape and output.shape[2:].numel() > 1:
        return close(mean, answer)  # the model may sum in another order
    return torch.equal(output.flatten(1).to(answer), answer)


def _decides(model: nn.Module, layer: nn.Module, x: Tensor, answer: Tensor) -> bool:
    """Whether a change of the layer's output changes the answer by just as much."""
    change = torch.linspace(-4, 4, answer.shape[1]).to(answer) * (1 + answer.abs().max())

    def add(_layer: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + (change[:, None, None] if is_convolution(layer) else change).to(output)

    handle = layer.register_forward_hook(add)
    moved = model(x)
    handle.remove()
    weights = next(model.parameters())
    return close(moved.to(weights), (answer + change).to(weights))


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal but for rounding."""
    if a.shape != b.shape:
        return False
    tolerance = torch.finfo(b.dtype).eps ** 0.5 * float(b.abs().max())
    return bool(((a.to(b) - b).abs() <= tolerance).all())


def over_positions(head: nn.Module, values: Tensor) -> Tensor:
    """The mean over the positions of a 1x1 convolution's input or output, (B, C)."""
    pooled = is_convolution(head) and values.dim() > 2
    return values.flatten(2).mean(2) if pooled else values


def is_convolution(head: nn.Module) -> bool:
    """Whether a head, adapted or not, is a convolution."""
    return isinstance(getattr(head, "head", head), nn.Conv2d)


@contextmanager
def capture_features(head: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list to which every forward pass in the block appends the input of ``head``.

    For a 1x1 convolution it is the mean over positions: the features that its mean output is
    linear in.
    """
    captured: list[Tensor] = []
    handle = head.register_forward_pre_hook(
        lambda module, args: captured.append(over_positions(module, args[0]))
    )
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
