"""Any trained classifier, made ready: a copy that takes images and returns a tensor of logits.

The copy has the parameter names of the bare network, whatever was wrapped around it, so states,
adapters and weights move between the two. What was asked for (`spec_of`) rebuilds it from the bare
classifier.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twoshift.errors import ModelError, SettingError
from twoshift.models._plain_norm import plain_batch_norms
from twoshift.models.base import expand

EAGER = (
    "Give the module that it was made from, and load its weights: "
    "twoshift.models.weights.load_weights(model, file)."
)
LOGITS = "logits"  # the entry that is taken where there is one


def prepare(
    model: nn.Module,
    *,
    output: str | int | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
) -> nn.Module:
    """A copy of ``model`` that the rest of the package can use; the given model is untouched.

    It is without DataParallel, DistributedDataParallel and torch.compile, takes images, and returns
    a tensor of logits, (B, C), in float32 or better. Synchronised batch normalisation, and batch
    normalisation that includes the activation, becomes plain batch normalisation of the same name
    that computes the same. A model that was prepared before keeps what it was prepared for.

    Args:
        model: Any trained classifier.
        output: Which entry of its output holds the logits: a key, attribute or position. By default
            a tensor is taken as it is, and of several entries the one called ``"logits"`` or the
            only one with a row for each image.
        mean: Subtracted from the images before the model sees them, per channel.
        std: The images are divided by it after that, per channel.
    """
    bare = unwrap(model)
    _check(bare)
    prepared = _copied(bare)
    plain_batch_norms(prepared)
    _choose_output(prepared, output)
    if mean is not None or std is not None:
        _normalise(prepared, mean, std)
    return prepared


def spec_of(model: nn.Module) -> dict[str, Any]:
    """What a model was prepared for, as it fits into JSON: ``prepare(bare, **spec)`` does it again.

    Empty if nothing was asked for.
    """
    bare = unwrap(model)
    logits, normalised = _logits_hook(bare), _normaliser(bare)
    spec: dict[str, Any] = {}
    if logits is not None and logits.output is not None:
        spec["output"] = logits.output
    if normalised is not None:
        spec |= {"mean": list(normalised.mean), "std": list(normalised.std)}
    return spec


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel and torch.compile."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrap(model.module)
    if isinstance(model, nn.Module) and "_orig_mod" in model._modules:  # of torch.compile
        return unwrap(model.get_submodule("_orig_mod"))
    return model


@dataclass
class _Logits:
    """Forward hook of the root: finds the logits in whatever the model returns."""

    output: str | int | None = None

    def __call__(self, model: nn.Module, images: tuple[Any, ...], answer: Any) -> Tensor:
        # not len(): an exporter that traces the batch of any size would fix it to a number
        rows = images[0].shape[0] if images and isinstance(images[0], Tensor) else None
        name = type(model).__name__
        if self.output is not None:
            answer = self._chosen(name, answer)
        elif not isinstance(answer, Tensor):
            answer = _found(name, answer, rows)
        logits = _rows_of(answer)
        if not _is_logits(logits, rows):
            raise ModelError(
                f"the answer of {name}",
                must_be=f"logits of two classes or more, ({'B' if rows is None else rows}, C)",
                got=_shown(answer),
                cure="Give a model that ends in one score for each class.",
            )
        return logits.to(torch.promote_types(logits.dtype, torch.float32))  # losses need it

    def _chosen(self, name: str, answer: Any) -> Any:
        entries = _entries(answer)
        values = list(entries.values())
        if self.output in entries:
            return entries[self.output]
        if isinstance(self.output, int) and -len(values) <= self.output < len(values):
            return values[self.output]
        cure = "Leave output out." if isinstance(answer, Tensor) else None
        got = _shown(answer) if not entries else _listed(entries)
        raise ModelError(
            f"the output of {name} has no entry {self.output!r}", must_be="one", got=got, cure=cure
        )


@dataclass
class _Normalise:
    """Forward pre-hook of the root: (images - mean) / std per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, model: nn.Module, images: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = images
        channels = x.shape[1] if x.dim() > 1 else 0
        if len(self.mean) not in (1, channels):
            must_be = f"one value, or {channels} as the images have channels"
            raise SettingError("mean and std of the images", must_be=must_be, got=len(self.mean))
        mean, std = (expand(x.new_tensor(values), x) for values in (self.mean, self.std))
        return ((x - mean) / std, *others)


def _choose_output(model: nn.Module, output: str | int | None) -> None:
    if output is not None and (not isinstance(output, str | int) or isinstance(output, bool)):
        raise SettingError(
            "output of a classifier", must_be="a key, an attribute or a position", got=repr(output)
        )
    hook = _logits_hook(model)
    if hook is None:
        model.register_forward_hook(_Logits(output))
    elif output is not None:
        if hook.output not in (None, output):
            raise _conflict("output", hook.output, output)
        hook.output = output


def _normalise(
    model: nn.Module, mean: float | Sequence[float] | None, std: float | Sequence[float] | None
) -> None:
    means, stds = _numbers("mean", mean, 0.0), _numbers("std", std, 1.0)
    length = max(len(means), len(stds))
    means, stds = (v * length if len(v) == 1 else v for v in (means, stds))
    if len(means) != len(stds):
        must_be = "of the same length"
        raise SettingError("mean and std", must_be=must_be, got=f"{len(means)} and {len(stds)}")
    if min(stds) <= 0:
        raise SettingError("std of the images", must_be="positive", got=std)
    hook, new = _normaliser(model), _Normalise(means, stds)
    if hook is None:
        model.register_forward_pre_hook(new, prepend=True)  # before the user's own hooks
    elif hook != new:
        raise _conflict("mean and std", (hook.mean, hook.std), (means, stds))


def _numbers(name: str, values: Any, default: float) -> tuple[float, ...]:
    if values is None:
        return (default,)
    try:
        numbers = tuple(float(v) for v in (values if hasattr(values, "__iter__") else [values]))
    except (TypeError, ValueError):
        numbers = ()
    if not numbers or not all(map(math.isfinite, numbers)):
        must_be = "a finite number, or one per channel"
        raise SettingError(f"{name} of the images", must_be=must_be, got=values)
    return numbers


def _conflict(what: str, before: object, now: object) -> SettingError:
    return SettingError(
        f"{what} of a prepared classifier",
        must_be=f"{before!r}, as before",
        got=repr(now),
        cure="Give the bare classifier.",
    )


def _logits_hook(model: nn.Module) -> _Logits | None:
    return next((h for h in model._forward_hooks.values() if isinstance(h, _Logits)), None)


def _normaliser(model: nn.Module) -> _Normalise | None:
    hooks = model._forward_pre_hooks.values()
    return next((h for h in hooks if isinstance(h, _Normalise)), None)


def _found(name: str, answer: Any, rows: int | None) -> Any:
    """The logits among several entries."""
    entries = _entries(answer)
    if isinstance(entries.get(LOGITS), Tensor):
        return entries[LOGITS]
    candidates = {k: v for k, v in entries.items() if _is_logits(_rows_of(v), rows)}
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    if candidates:
        what = f"several entries in the output of {name} may be the logits"
        raise ModelError(
            f"{what}: {_listed(candidates)}",
            cure=f"Name the one: output={next(iter(candidates))!r}.",
        )
    raise ModelError(
        f"the output of {name}",
        must_be="a tensor of logits, or contain one",
        got=_listed(entries) or _shown(answer),
    )


def _entries(answer: Any) -> dict[Any, Any]:
    """The parts of an output by key, field or position; none of a tensor."""
    if isinstance(answer, Tensor):
        return {}
    if isinstance(answer, Mapping):
        return dict(answer)
    if isinstance(answer, tuple) and hasattr(answer, "_asdict"):
        return dict(answer._asdict())
    if isinstance(answer, tuple | list):
        return dict(enumerate(answer))
    return dict(getattr(answer, "__dict__", {}))


def _rows_of(value: Any) -> Any:
    """(B, C, 1, 1) as (B, C); anything else as it is."""
    if isinstance(value, Tensor) and value.dim() > 2 and value[0:1, 0:1].numel() <= 1:
        return value.flatten(1)
    return value


def _is_logits(value: Any, rows: int | None) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != 2:
        return False
    return value.shape[1] > 1 and rows in (None, value.shape[0])


def _listed(entries: Mapping[Any, Any]) -> str:
    return ", ".join(f"{key!r}: {_shown(value)}" for key, value in entries.items())


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__


def _check(model: nn.Module) -> None:
    """Refuse a model whose layers cannot be copied, replaced or moved."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            "a classifier", must_be="an nn.Module", got=type(model).__name__, cure=EAGER
        )
    name = type(model).__name__
    for path, module in model.named_modules():
        if _is_compiled(module):
            where = f" ({path})" if path else ""
            what = f"{name} is TorchScript or an exported program{where}: its layers cannot be "
            raise ModelError(f"{what}replaced or hooked", cure=EAGER)
        if hasattr(module, "_packed_params"):
            cure = "Give the model before quantisation."
            raise ModelError(f"{path or name} is quantised: it cannot learn", cure=cure)
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ModelError(f"weights of {name}", must_be="at least one parameter", got="none")
    for path, tensor in _tensors(model):
        if problem := _problem(tensor):
            got, cure = problem
            must_be = "a dense tensor of floating-point numbers, with values"
            raise ModelError(f"{path} of {name}", must_be=must_be, got=got, cure=cure)
    for what, values, cure in (
        ("device", {p.device for p in parameters.values()}, "model.to(device)"),
        ("type", {p.dtype for p in parameters.values()}, "model.float()"),
    ):
        if len(values) > 1:
            raise ModelError(
                f"the weights of {name}",
                must_be=f"of one {what}",
                got=" and ".join(sorted(map(str, values))),
                cure=f"Convert it: {cure}.",
            )


def _is_compiled(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return any(True for _ in module.state_dict())  # a function without weights is harmless
    if isinstance(module, torch.fx.GraphModule):  # a traced one still calls layers
        return any(isinstance(n.target, torch._ops.OpOverload) for n in module.graph.nodes)
    return False


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _problem(tensor: Tensor) -> tuple[str, str] | None:
    """What is wrong with a parameter or buffer, and the cure."""
    if nn.parameter.is_lazy(tensor):
        return "one that is not initialised", "Call the model once on a batch."
    if tensor.is_meta:
        return "one without values (meta)", "Load its weights: model.to_empty(device=...) first."
    if tensor.layout != torch.strided:
        return f"one that is sparse ({tensor.layout})", "Make it dense: tensor.to_dense()."
    if tensor.is_quantized or (isinstance(tensor, nn.Parameter) and not tensor.is_floating_point()):
        return f"{tensor.dtype} (quantised)", "Give the model before quantisation."
    return None


def _copied(model: nn.Module) -> nn.Module:
    """A deep copy, in which modules stand for their wrappers."""
    memo: dict[int, Any] = {}
    try:
        for module in model.modules():
            for value in vars(module).values():
                if isinstance(value, Tensor) and not value.is_leaf:  # results kept by a module
                    memo[id(value)] = value.detach().clone()
        for module in reversed(list(model.modules())):  # inner ones first
            if (inner := unwrap(module)) is not module:
                memo[id(module)] = copy.deepcopy(inner, memo)
        return copy.deepcopy(model, memo)
    except Exception as e:  # whatever an attribute raises
        raise ModelError(
            f"{type(model).__name__} cannot be copied, because of {_culprit(model)}: {e}",
            cure="Remove that attribute before, or define __deepcopy__.",
        ) from e


def _culprit(model: nn.Module) -> str:
    """The attribute that cannot be copied."""
    for path, module in reversed(list(model.named_modules())):
        for name, value in vars(module).items():
            try:
                copy.deepcopy(value)
            except Exception:
                return f"{path}.{name}" if path else name
    return "its own __deepcopy__"
