"""What every test-time adaptation method is: call it, it predicts and adapts.

A method owns a copy of the model. Its whole state is a flat dictionary of tensors: `reset` loads
the first one, `save` writes the current one, `load` goes on from it bit for bit.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from twoshift.adapters import AdaptedHead, Scores, adapted_heads, score
from twoshift.errors import BatchError, CheckpointError, MismatchError, ModelError, SettingError
from twoshift.models.norm import NORMS, guard_group_norms
from twoshift.registry import Registry, near_miss
from twoshift.storage import fingerprint

State = dict[str, Tensor]
MEMORY = "memory."

# what networks raise for an input that does not fit; assertions are usual in vision transformers
MODEL_REFUSALS = (RuntimeError, ValueError, IndexError, AssertionError)


class Method(nn.Module):
    """Predicting on a batch also adapts. The given model is never changed.

    A subclass stores every argument of its constructor under the argument's name, chooses what
    may move, ends its constructor with ``self.ready()``, and defines `adapt`.

    Args:
        model: The classifier; a copy is kept, in evaluation mode, with all gradients off.

    Attributes:
        title: What papers and tables call it.
        reference: Where it comes from.
        needs: What it wants beside a trained model; shown by ``twoshift ls methods``.
        statistics: Whose statistics normalise the prediction: ``"running"`` or ``"batch"``.
        memory: Tensors whose shape the stream decides, such as kept images. An entry is replaced,
            never written into, so that a state may share it.
    """

    title: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    statistics: str = "running"
    optimizer: torch.optim.Optimizer | None = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        with torch.inference_mode(False):  # the copy must be able to learn, whoever makes it
            self.model = copy.deepcopy(model).eval().requires_grad_(False)
        guard_group_norms(self.model)
        self.generator = torch.Generator()  # every random draw of a method comes from here
        self.memory: dict[str, Tensor] = {}

    @classmethod
    def statistics_on(cls, model: nn.Module) -> str:
        """Whose statistics would normalise the predictions of ``model`` under this method."""
        return cls.statistics

    def adapt(self, x: Tensor) -> Scores:
        """The scores of ``x``, as `predict` returns them; adapts on the way. Never sees labels."""
        raise TypeError(f"{type(self).__name__} must define adapt")

    def predict(self, x: Tensor, model: nn.Module | None = None) -> Scores:
        """A forward pass whose logits are scored, by ``model`` where it is not the method's own.

        Beside the logits it returns what the original head says without an adapter, which label
        estimators may read. Passes that only learn call the model itself.
        """
        return score(self.model if model is None else model, x)

    def forward(self, x: Tensor) -> Tensor:
        """Predict a batch and adapt to it. A refused batch leaves the state as it was."""
        x = self._checked(x)
        # adapting needs gradients, whatever mode the caller is in
        with torch.inference_mode(False), torch.enable_grad():
            before = self.state()  # small beside a forward pass
            try:
                # detached: the caller's graph must not feel the backward pass
                given = x.clone() if x.is_inference() else x.detach()
                written = given._version
                logits = self.adapt(given).logits.detach()
                _check_finite("the prediction", logits)
                if given._version != written:
                    raise ModelError(
                        f"{type(self.model).__name__} changes its input in place, so that a second "
                        "pass would see other images",
                        cure="Write x = x - mean rather than x.sub_(mean) in its forward.",
                    )
            except BaseException as e:
                self.load_state(before)
                if isinstance(e, BatchError) or not isinstance(e, MODEL_REFUSALS):
                    raise
                raise BatchError(
                    f"the model cannot take a batch of shape {tuple(x.shape)}: {e}",
                    must_be=_expected_input(self.model),
                ) from e
        return logits

    def reset(self) -> None:
        """Back to the moment of construction, exactly: weights, statistics, optimiser, draws."""
        self.load_state(self._initial)

    def ready(self) -> None:
        """End of construction: remember what `reset` goes back to."""
        self._initial = self.state()

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments but the model: ``create(name, model, **settings)``."""
        names = [n for n in inspect.signature(type(self)).parameters if n != "model"]
        values = {n: getattr(self, n) for n in names}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    def moving(self) -> dict[str, Tensor]:
        """Everything that adaptation may change: trained parameters and all buffers."""
        trained = {n: p for n, p in self.named_parameters() if p.requires_grad}
        return {**trained, **dict(self.named_buffers())}

    def state(self) -> State:
        """A copy of the whole state, flat."""
        state = {n: t.detach().clone() for n, t in self.moving().items()}
        for i, parameter in enumerate(self._optimised()):
            assert self.optimizer is not None
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    state[f"optimizer.{i}.{key}"] = value.detach().clone()
        state["generator"] = self.generator.get_state()
        return {**state, **{f"{MEMORY}{n}": t for n, t in self.memory.items()}}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put a state back, bit for bit."""
        # in this order: leaving inference mode turns gradients on
        with torch.inference_mode(False), torch.no_grad():
            moving = self.moving()
            for name, tensor in moving.items():
                _check_fits(name, tensor, state.get(name))
            _check_fits("generator", self.generator.get_state(), state.get("generator"))
            for name, tensor in moving.items():
                tensor.copy_(state[name])
            if self.optimizer is not None:
                self.optimizer.state.clear()
                self.optimizer.zero_grad(set_to_none=True)
                parameters = self._optimised()
                for name, value in state.items():
                    if name.startswith("optimizer."):
                        _, i, key = name.split(".", 2)
                        parameter = parameters[int(i)]
                        # a fused optimiser counts steps beside its parameters, others on the CPU
                        beside = key != "step" or self.optimizer.defaults.get("fused")
                        device = parameter.device if beside else torch.device("cpu")
                        self.optimizer.state[parameter][key] = value.to(device, copy=True)
            self.generator.set_state(state["generator"].cpu())
            self.memory = {
                n.removeprefix(MEMORY): t.to(self.device)
                for n, t in state.items()
                if n.startswith(MEMORY)
            }

    def minimise(self, loss: Tensor) -> None:
        """One step of the optimiser."""
        assert self.optimizer is not None
        _check_finite("the loss", loss)  # one NaN step would spoil every later prediction
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def _optimised(self) -> list[nn.Parameter]:
        if self.optimizer is None:
            return []
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def train(self, mode: bool = True) -> Self:
        """Do nothing: a method sets the modes of its layers itself, callers must not."""
        return self

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def _checked(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise BatchError("a batch", must_be="a torch.Tensor", got=type(x).__name__)
        wanted = _expected_input(self.model)
        if x.dim() < 2 or x.shape[0] == 0 or x.numel() == 0:
            raise BatchError("a batch", must_be=f"{wanted}, not empty", got=f"{tuple(x.shape)}")
        dtype = next(self.model.parameters()).dtype
        if x.dtype != dtype:
            cure = "images.float() / 255." if x.dtype == torch.uint8 else f"x.to({dtype})."
            raise BatchError("a batch", must_be=dtype, got=x.dtype, cure=f"Convert: {cure}")
        first = _first_layer(self.model)
        if isinstance(first, nn.Conv2d) and (x.dim() != 4 or x.shape[1] != first.in_channels):
            raise BatchError("a batch", must_be=wanted, got=f"{tuple(x.shape)}")
        # the sum is a quick first look; it may also overflow, so the exact test has the last word
        if not x.sum().isfinite() and not torch.isfinite(x).all():
            raise BatchError("a batch", must_be="finite", got="NaN or infinite pixels")
        return x.to(self.device)

    def save(self, folder: str | Path) -> None:
        """Write the whole adaptation state to ``folder``, atomically; it may exist."""
        from twoshift.methods._saving import save_method

        save_method(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path, model: nn.Module) -> Self:
        """Go on from a saved state; ``model`` is the bare classifier it was made from."""
        from twoshift.methods._saving import load_method

        restored = load_method(Path(folder), model)
        if not isinstance(restored, cls):
            raise CheckpointError(
                f"{folder}", must_be=f"a saved {cls.__name__}", got=type(restored).__name__
            )
        return restored

    def origin(self) -> str:
        """Fingerprint of the model as given: what never moves, and what was there at first."""
        frozen = {n: p for n, p in self.named_parameters() if not p.requires_grad}
        return fingerprint({**frozen, **self._initial})


methods: Registry[type[Method]] = Registry("method", "twoshift.methods")


def norm_affine(model: nn.Module, freeze: Sequence[str] = ()) -> list[nn.Parameter]:
    """Weights and biases of the normalisation layers, the adapter's and the frozen ones left out.

    Args:
        model: Where to look.
        freeze: Paths of modules that stay as they are, for example ``["layer4"]``.
    """
    _check_paths(model, freeze)
    heads = [name for name, m in model.named_modules() if isinstance(m, AdaptedHead)]
    layers = [m for m in model.modules() if isinstance(m, NORMS) and list(m.parameters(False))]
    kept = [
        m
        for name, m in model.named_modules()
        if isinstance(m, NORMS) and not _below(name, [*freeze, *heads])
    ]
    affine = [p for m in kept for p in m.parameters(recurse=False)]
    if not affine:
        found = "all of them frozen" if layers else "none"
        raise ModelError(
            f"normalisation layers with weights in {type(model).__name__}",
            must_be="at least one, since their weights are what adapts",
            got=found,
        )
    return affine


def trainable(model: nn.Module, freeze: Sequence[str] = ()) -> dict[str, nn.Parameter]:
    """All parameters by name, the adapter's and the frozen ones left out.

    Args:
        model: Where to look.
        freeze: Paths of modules that stay as they are.
    """
    _check_paths(model, freeze)
    still = [*freeze, *(f"{path}.adapter" for path, _ in adapted_heads(model))]
    found = {n: p for n, p in model.named_parameters() if not _below(n, still)}
    if not found:
        raise ModelError(
            f"weights of {type(model).__name__} that may move",
            must_be="at least one, since they are what adapts",
            got="all of them frozen",
        )
    return found


def _check_paths(model: nn.Module, given: Sequence[str]) -> None:
    names = [name for name, _ in model.named_modules() if name]
    for path in given:
        if path not in names:
            top = [n for n in names if "." not in n]
            raise SettingError(
                f"freeze: {type(model).__name__} has no module {path!r}", cure=near_miss(path, top)
            )


def paths(given: str | Sequence[str]) -> tuple[str, ...]:
    """Paths of modules; a single one may come without its list."""
    return (given,) if isinstance(given, str) else tuple(given)


def _below(name: str, paths: Iterable[str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def make_optimizer(
    name: str, parameters: list[nn.Parameter], lr: float, momentum: float = 0.9
) -> torch.optim.Optimizer:
    """Adam or SGD over ``parameters``, which from now on have gradients."""
    if not lr > 0:
        raise SettingError("lr", must_be="positive", got=lr)
    for parameter in parameters:
        parameter.requires_grad_(True)
    if name == "adam":
        # many small tensors: one kernel for all of them is several times faster
        fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
        return torch.optim.Adam(parameters, lr=lr, fused=fused)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum)
    raise SettingError("optim", must_be="'adam' or 'sgd'", got=repr(name))


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the prediction, per sample."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


def _first_layer(model: nn.Module) -> nn.Module | None:
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    return next((m for m in model.modules() if isinstance(m, kinds)), None)


def _expected_input(model: nn.Module) -> str:
    first = _first_layer(model)
    if isinstance(first, nn.Conv2d):
        return f"(B, {first.in_channels}, H, W)"
    if isinstance(first, nn.Linear):
        return f"(B, ...) with {first.in_features} values per sample"
    return "(B, ...)"


def _check_finite(what: str, values: Tensor) -> None:
    if not values.isfinite().all():
        raise BatchError(
            what,
            must_be="finite",
            got="NaN or infinity",
            cure="Check the range of the images (usually [0, 1]) and the model's weights.",
        )


def _check_fits(name: str, tensor: Tensor, saved: Tensor | None) -> None:
    if saved is None or saved.shape != tensor.shape or saved.dtype != tensor.dtype:
        got = "nothing" if saved is None else f"{saved.dtype} {tuple(saved.shape)}"
        raise MismatchError(
            f"state of {name}", must_be=f"{tensor.dtype} {tuple(tensor.shape)}", got=got
        )
