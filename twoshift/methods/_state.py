"""The state of a method as a flat dictionary of tensors: take it, check one, put it back.

A state holds only what moves. Nothing is put back before all of it was checked: torch trusts the
shapes of an optimiser's moments, and writes out of bounds where they are wrong.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twoshift.adapters import Adapter
from twoshift.errors import MismatchError, TwoshiftWarning
from twoshift.tensors import PLAIN, oddity

if TYPE_CHECKING:
    from twoshift.methods.base import Method

State = dict[str, Tensor]
GENERATOR, MEMORY, OPTIMIZER = "generator", "memory.", "optimizer."
MOMENT = re.compile(r"optimizer\.(0|[1-9][0-9]{0,8})\.(\w+)")
OF_LAYERS = {"running_var", "num_batches_tracked", "test_std", "component_var"}
NOT_NEGATIVE = OF_LAYERS | {"step", "exp_avg_sq"}


def fixed_names(module: nn.Module) -> set[str]:
    """Names of the buffers below ``module`` that never move: those that their owners declare.

    A layer names its own in ``fixed_buffers``; an adapter never moves at all.
    """
    names: set[str] = set()
    for path, part in module.named_modules():
        own = getattr(part, "fixed_buffers", ())
        if isinstance(part, Adapter):
            own = dict(part.named_buffers())
        names |= {f"{path}.{name}" if path else name for name in own}
    return names


class Places:
    """Where tensors are in a module: finding them again costs no walk through the network."""

    def __init__(self, places: list[tuple[str, dict[str, Any], str]]) -> None:
        self._places = places  # name, dictionary of the owner, key in it

    @classmethod
    def of(cls, module: nn.Module, names: list[str]) -> Places | None:
        """The places of parameters and buffers; None if a name is not the path of one."""
        places = []
        for name in names:
            path, _, key = name.rpartition(".")
            try:
                owner = module.get_submodule(path)
            except AttributeError:
                return None
            # the owner's own dictionaries: `module.to` puts other tensors into them
            found = [d for d in (owner._parameters, owner._buffers) if key in d]
            if not found:
                return None
            places.append((name, found[0], key))
        return cls(places)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name: tensors[key] for name, tensors, key in self._places}


@torch.no_grad()  # half the time of detaching each of hundreds of small tensors
def capture(method: Method, moving: Mapping[str, Tensor]) -> State:
    """A copy of the whole state."""
    state = {n: t.clone() for n, t in moving.items()}
    if method.optimizer is not None:
        for i, parameter in enumerate(method._optimised()):
            for key, value in method.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    state[f"{OPTIMIZER}{i}.{key}"] = value.clone()
    state[GENERATOR] = method.generator.get_state()
    return {**state, **{f"{MEMORY}{n}": t for n, t in method.memory.items()}}


@torch.no_grad()
def restore(method: Method, moving: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Put back a state that `capture` or `fitting` returned."""
    for name, tensor in moving.items():
        tensor.copy_(state[name])
    if method.optimizer is not None:
        method.optimizer.state.clear()
        method.optimizer.zero_grad(set_to_none=True)
        parameters = method._optimised()
        for name, value in state.items():
            if name.startswith(OPTIMIZER):
                _, i, key = name.split(".", 2)
                parameter = parameters[int(i)]
                method.optimizer.state[parameter][key] = _moment(method, parameter, key, value)
    method.generator.set_state(state[GENERATOR].cpu())
    method.memory = {
        n.removeprefix(MEMORY): t.to(method.device)
        for n, t in state.items()
        if n.startswith(MEMORY)
    }


def _moment(method: Method, parameter: Tensor, key: str, value: Tensor) -> Tensor:
    if key == "step" or value.shape != parameter.shape:
        # only a fused optimiser counts its steps on the parameters' device
        assert method.optimizer is not None
        on_cpu = key == "step" and not method.optimizer.defaults.get("fused")
        return value.to("cpu" if on_cpu else parameter.device, copy=True)
    # in the parameter's memory layout, which a file loses and a fused kernel takes for granted
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def fitting(
    method: Method, moving: Mapping[str, Tensor], state: Mapping[str, Tensor], quiet: bool
) -> State:
    """``state`` as `restore` takes it; an error if any of it does not belong to ``method``.

    Args:
        method: The method.
        moving: Its tensors that move.
        state: The state to check.
        quiet: No warning where it is rounded.
    """
    fit = _Fit(method, state)
    for name, tensor in moving.items():
        fit.like(name, tensor)
    fit.generator()
    fit.optimizer()
    fit.memory()
    fit.nothing_else()
    if fit.rounded and not quiet:
        warnings.warn(
            f"the state was rounded from {', '.join(sorted(fit.rounded))}: it goes on from nearly "
            "the same point, not bit for bit",
            TwoshiftWarning,
            stacklevel=2,
        )
    return fit.result


class _Fit:
    """The checks of one state: each moves what it accepts from ``left`` to ``result``."""

    def __init__(self, method: Method, state: Mapping[str, Tensor]) -> None:
        if not isinstance(state, Mapping) or not all(isinstance(n, str) for n in state):
            raise MismatchError(
                "a state", must_be="a dictionary of tensors by name", got=type(state).__name__
            )
        for name, tensor in state.items():
            if odd := oddity(tensor):
                raise _refusal(name, PLAIN, odd)
        self.method, self.result, self.rounded = method, State(), set[str]()
        # inference tensors could not be saved for a later backward
        self.left = {n: t.clone() if t.is_inference() else t.detach() for n, t in state.items()}

    def like(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
        """Accept an entry that is like ``tensor``, or of the type ``dtype`` instead of its own."""
        dtype, saved = dtype or tensor.dtype, self.left.pop(name, None)
        if saved is None or saved.shape != tensor.shape or not _castable(saved.dtype, dtype):
            got = "nothing" if saved is None else f"{saved.dtype} {tuple(saved.shape)}"
            raise _refusal(name, f"{dtype} {tuple(tensor.shape)}", got)
        self.result[name] = saved = self.cast(name, saved, dtype)
        first = self.method._initial.get(name)
        if not _sound(saved) and not (first is not None and _sound(saved, first)):
            raise _refusal(name, "finite", "NaN or infinity")
        last = name.rpartition(".")[2]
        if last in NOT_NEGATIVE | self.method.not_negative and (saved < 0).any():
            raise _refusal(name, "at least 0", f"{saved.min():g}")

    def cast(self, name: str, saved: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor of the type ``dtype``, rounded where it has to be."""
        if saved.dtype == dtype:
            return saved
        self.rounded.add(f"{saved.dtype} to {dtype}".replace("torch.", ""))
        return saved.to(dtype)

    def generator(self) -> None:
        """Accept the state of a random generator."""
        self.like(GENERATOR, self.method.generator.get_state())
        saved = self.result[GENERATOR].cpu().contiguous().clone()
        try:
            torch.Generator().set_state(saved)
        except RuntimeError as e:
            raise _refusal(GENERATOR, "a state of torch.Generator", "other bytes") from e
        self.result[GENERATOR] = saved

    def optimizer(self) -> None:
        """Accept moments of the optimised parameters, for each of them all or none."""
        parameters, known = self.method._optimised(), _moments_of(self.method.optimizer)
        found: dict[int, set[str]] = {}
        for name in [n for n in self.left if n.startswith(OPTIMIZER)]:
            match = MOMENT.fullmatch(name)
            if match is None or int(match[1]) >= len(parameters):
                raise _refusal(name, f"of one of {len(parameters)} trained parameters", "another")
            i, key = int(match[1]), match[2]
            if known is not None and key not in known:
                raise _refusal(name, f"one of {', '.join(sorted(known))}", key)
            saved = self.left[name]
            if key == "step" or (known is None and not saved.dim()):
                self._count(name, saved)
            else:
                self.like(name, parameters[i])
            found.setdefault(i, set()).add(key)
        for i, keys in found.items():
            if known is not None and keys != known:
                missing = ", ".join(sorted(known - keys))
                raise _refusal(f"{OPTIMIZER}{i}", f"complete, with {missing}", "only some of it")

    def _count(self, name: str, saved: Tensor) -> None:
        # torch counts in single precision, or in double where that is the default
        if saved.dtype not in (torch.float32, torch.get_default_dtype()):
            raise _refusal(name, "torch.float32 ()", f"{saved.dtype} {tuple(saved.shape)}")
        self.like(name, torch.empty((), device=saved.device), saved.dtype)

    def memory(self) -> None:
        """Accept what the method may remember."""
        method = self.method
        memory: State = {}
        for name in [n for n in self.left if n.startswith(MEMORY)]:
            short, saved = name.removeprefix(MEMORY), self.left.pop(name)
            if short not in method.remembers:
                names = ", ".join(sorted(method.remembers)) or "nothing"
                raise _refusal(name, f"what {type(method).__name__} remembers: {names}", short)
            dtype = method.remembers[short] or method.dtype
            if not _castable(saved.dtype, dtype) or not _sound(saved):
                raise _refusal(name, f"finite {dtype}", f"{saved.dtype}")
            memory[short] = self.cast(name, saved, dtype)
        if memory:
            method.check_memory(memory, self.result)
        self.result |= {f"{MEMORY}{n}": t for n, t in memory.items()}

    def nothing_else(self) -> None:
        """Refuse what is left, except what never moves: older states hold it, too."""
        fixed = self.method._fixed() if self.left else {}
        for name, saved in self.left.items():
            now = fixed.get(name)
            if now is None:
                raise MismatchError(
                    f"state of {name}: {type(self.method).__name__} has no such part",
                    cure="Load it into the method that it was saved from.",
                )
            if not _castable(saved.dtype, now.dtype) or not _agree(saved, now):
                raise _refusal(name, "that of the model, which never moves", "other values")


def _moments_of(optimizer: torch.optim.Optimizer | None) -> set[str] | None:
    """What an optimiser keeps of a parameter, all or nothing of it; None for an unknown one."""
    if type(optimizer) is torch.optim.Adam:
        largest = {"max_exp_avg_sq"} if optimizer.defaults["amsgrad"] else set()
        return {"step", "exp_avg", "exp_avg_sq"} | largest
    if type(optimizer) is torch.optim.SGD:
        return {"momentum_buffer"} if optimizer.defaults["momentum"] else set()
    return None if optimizer else set()


def _refusal(name: str, must_be: str, got: str) -> MismatchError:
    return MismatchError(f"state of {name}", must_be=must_be, got=got)


def _castable(old: torch.dtype, new: torch.dtype) -> bool:
    return old == new or (old.is_floating_point and new.is_floating_point)


def _sound(saved: Tensor, first: Tensor | None = None) -> bool:
    """Whether all values are finite, or else what they were at first, such as a mask's."""
    finite = saved.isfinite()
    if first is not None:
        first = first.to(saved)
        finite = finite | (saved == first) | (saved.isnan() & first.isnan())
    return bool(finite.all())


def _agree(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal in the coarser one of their types."""
    b = b.to(a.device)
    if a.shape != b.shape:
        return False
    return torch.equal(a, b.to(a.dtype)) or torch.equal(a.to(b.dtype), b)
