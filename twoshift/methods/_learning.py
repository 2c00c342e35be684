"""What methods that learn have in common: which weights move, by which steps, towards what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from twoshift.adapters import adapted_heads
from twoshift.errors import ModelError, SettingError
from twoshift.models.norm import NORMS
from twoshift.registry import check_choice, check_numbers, near_miss


def norm_affine(model: nn.Module, freeze: Sequence[str] = ()) -> list[nn.Parameter]:
    """Weights and biases of the normalisation layers, except the adapter's and the frozen ones.

    Args:
        model: The classifier.
        freeze: Paths of modules that stay as they are, for example ``["layer4"]``.
    """
    _check_paths(model, freeze)
    excluded = [*freeze, *(path for path, _ in adapted_heads(model))]
    norms = {n: m for n, m in model.named_modules() if isinstance(m, NORMS)}
    weights = {n: list(m.parameters(recurse=False)) for n, m in norms.items()}
    affine = [p for n, layer in weights.items() if not _below(n, excluded) for p in layer]
    if not affine:
        raise ModelError(
            f"normalisation layers with weights in {type(model).__name__}",
            must_be="at least one, since their weights are what adapts",
            got="all of them frozen" if any(weights.values()) else "none",
        )
    return affine


def trainable(model: nn.Module, freeze: Sequence[str] = ()) -> dict[str, nn.Parameter]:
    """All parameters by name, except the adapter's and the frozen ones.

    Args:
        model: The classifier.
        freeze: Paths of modules that stay as they are.
    """
    _check_paths(model, freeze)
    excluded = [*freeze, *(f"{path}.adapter" for path, _ in adapted_heads(model))]
    parameters = {n: p for n, p in model.named_parameters() if not _below(n, excluded)}
    if not parameters:
        raise ModelError(
            f"weights of {type(model).__name__} that may move",
            must_be="at least one, since they are what adapts",
            got="all of them frozen",
        )
    return parameters


def _check_paths(model: nn.Module, freeze: Sequence[str]) -> None:
    names = [name for name, _ in model.named_modules() if name]
    for path in freeze:
        if path not in names:
            top = [n for n in names if "." not in n]
            raise SettingError(
                f"freeze: {type(model).__name__} has no module {path!r}", cure=near_miss(path, top)
            )


def paths(freeze: str | Sequence[str]) -> tuple[str, ...]:
    """Paths of modules as a tuple; a single path may be a plain string."""
    return (freeze,) if isinstance(freeze, str) else tuple(freeze)


def _below(name: str, paths: Iterable[str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def make_optimizer(
    name: str, parameters: list[nn.Parameter], lr: float, momentum: float = 0.9
) -> torch.optim.Optimizer:
    """Adam or SGD over ``parameters``, whose gradients it turns on."""
    check_numbers("the optimiser", "above 0", lr=lr)
    check_choice("a method", ("adam", "sgd"), optim=name)
    for parameter in parameters:
        parameter.requires_grad_(True)
    if name == "adam":
        # one kernel for many small tensors is several times faster
        fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
        half = any(p.dtype == torch.float16 for p in parameters)
        eps = 1e-4 if half else 1e-8  # squares of small gradients are zero in float16
        return torch.optim.Adam(parameters, lr=lr, fused=fused, eps=eps)
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the prediction, per sample."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)
