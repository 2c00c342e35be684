"""The base of every test-time adaptation method: calling it predicts a batch and adapts to it.

A method owns a copy of the model. Its whole state is a flat dictionary of tensors: `reset` loads
the initial one, `save` writes the current one, and `load` resumes from it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from twoshift.adapters import Scores, adapted_heads, score
from twoshift.errors import BatchError, CheckpointError, MismatchError, ModelError, SettingError
from twoshift.models.classifier import prepare
from twoshift.models.norm import NORMS, guard_group_norms
from twoshift.registry import Registry, check_choice, check_numbers, near_miss, parameters_of
from twoshift.storage import fingerprint

State = dict[str, Tensor]
MEMORY = "memory."

# raised by networks for inputs of the wrong shape; vision transformers often use assertions
MODEL_REFUSALS = (RuntimeError, ValueError, IndexError, AssertionError)


class Method(nn.Module):
    """Predicting on a batch also adapts. The given model is never changed.

    A subclass stores every argument of its constructor under the argument's name, chooses what
    may move, ends its constructor with ``self.ready()``, and defines `adapt`.

    Args:
        model: The classifier; the method owns a copy, in evaluation mode, with all gradients off.

    Attributes:
        title: Its name in papers and tables.
        reference: The publication.
        needs: What it needs besides a trained model; shown by ``twoshift ls methods``.
        statistics: Which statistics normalise the predictions: ``"running"`` or ``"batch"``.
        memory: Tensors whose shape depends on the stream, such as stored images. An entry is
            replaced, never written into, so that a state may share it.
    """

    title: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    statistics: str = "running"
    optimizer: torch.optim.Optimizer | None = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        with torch.inference_mode(False):  # the copy must be able to learn
            self.model = prepare(model).eval().requires_grad_(False)
        guard_group_norms(self.model)
        self.generator = torch.Generator()  # the source of every random draw
        self.memory: dict[str, Tensor] = {}

    @classmethod
    def statistics_on(cls, model: nn.Module) -> str:
        """Which statistics this method normalises the predictions of ``model`` by."""
        return cls.statistics

    def adapt(self, x: Tensor) -> Scores:
        """Score ``x``, as `predict` does, and adapt to it. Labels are never available."""
        raise TypeError(f"{type(self).__name__} must define adapt")

    def predict(self, x: Tensor, model: nn.Module | None = None) -> Scores:
        """A forward pass that predicts; passes that only learn call the model itself.

        Args:
            x: The images.
            model: What predicts, for example a teacher; the method's own model by default.
        """
        return score(self.model if model is None else model, x)

    def forward(self, x: Tensor) -> Tensor:
        """Predict a batch and adapt to it. A refused batch leaves the state as it was."""
        x = self._checked(x)
        # adapting needs gradients, whatever the caller's mode is
        with torch.inference_mode(False), torch.enable_grad():
            before = self.state()  # cheap compared with a forward pass
            try:
                # detached: the backward pass must not reach the caller's graph
                images = x.clone() if x.is_inference() else x.detach()
                version = images._version
                logits = self.adapt(images).logits.detach()
                check_finite("the prediction", logits)
                if images._version != version:
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
        """Return exactly to the initial state: weights, statistics, optimiser, random draws."""
        self.load_state(self._initial)

    def ready(self) -> None:
        """End the construction: remember the state that `reset` returns to."""
        self._initial = self.state()

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments without the model: ``create(name, model, **settings)``."""
        names = [n for n in parameters_of(type(self)) if n != "model"]
        values = {n: getattr(self, n) for n in names}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    def moving(self) -> dict[str, Tensor]:
        """Everything that adaptation may change: trained parameters and all buffers."""
        trained = {n: p for n, p in self.named_parameters() if p.requires_grad}
        return {**trained, **dict(self.named_buffers())}

    def state(self) -> State:
        """A copy of the whole state, as a flat dictionary."""
        state = {n: t.detach().clone() for n, t in self.moving().items()}
        for i, parameter in enumerate(self._optimised()):
            assert self.optimizer is not None
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    state[f"optimizer.{i}.{key}"] = value.detach().clone()
        state["generator"] = self.generator.get_state()
        return {**state, **{f"{MEMORY}{n}": t for n, t in self.memory.items()}}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state, bit for bit."""
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
                        # only a fused optimiser counts its steps on the parameters' device
                        on_cpu = key == "step" and not self.optimizer.defaults.get("fused")
                        device = torch.device("cpu") if on_cpu else parameter.device
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
        check_finite("the loss", loss)  # one NaN step would spoil every later prediction
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def _optimised(self) -> list[nn.Parameter]:
        if self.optimizer is None:
            return []
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def train(self, mode: bool = True) -> Self:
        """Do nothing: a method sets the modes of its layers itself."""
        return self

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    def _checked(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise BatchError("a batch", must_be="a torch.Tensor", got=type(x).__name__)
        shape = _expected_input(self.model)
        if x.dim() < 2 or x.shape[0] == 0 or x.numel() == 0:
            raise BatchError("a batch", must_be=f"{shape}, not empty", got=f"{tuple(x.shape)}")
        dtype = next(self.model.parameters()).dtype
        if x.dtype != dtype:
            cure = "images.float() / 255." if x.dtype == torch.uint8 else f"x.to({dtype})."
            raise BatchError("a batch", must_be=dtype, got=x.dtype, cure=f"Convert: {cure}")
        first = _first_layer(self.model)
        if isinstance(first, nn.Conv2d) and (x.dim() != 4 or x.shape[1] != first.in_channels):
            raise BatchError("a batch", must_be=shape, got=f"{tuple(x.shape)}")
        # the sum is quick to check but may overflow, so the exact test decides
        if not x.sum().isfinite() and not torch.isfinite(x).all():
            raise BatchError("a batch", must_be="finite", got="NaN or infinite pixels")
        return x.to(self.device)

    def save(self, folder: str | Path) -> None:
        """Write the whole adaptation state to ``folder``, atomically; the folder may exist."""
        from twoshift.methods._saving import save_method

        save_method(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path, model: nn.Module) -> Self:
        """Resume from a saved state; ``model`` is its classifier, without an adapter."""
        from twoshift.methods._saving import load_method

        restored = load_method(Path(folder), model)
        if not isinstance(restored, cls):
            raise CheckpointError(
                f"{folder}", must_be=f"a saved {cls.__name__}", got=type(restored).__name__
            )
        return restored

    def origin(self) -> str:
        """Fingerprint of the given model: the weights that never move and the initial state."""
        frozen = {n: p for n, p in self.named_parameters() if not p.requires_grad}
        return fingerprint({**frozen, **self._initial})


methods: Registry[type[Method]] = Registry("method", "twoshift.methods")


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


def check_finite(what: str, values: Tensor) -> None:
    """Refuse a batch that leads to NaN or infinity."""
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
