"""The base of every test-time adaptation method: calling it predicts a batch and adapts to it.

A method owns a copy of the model. Its whole state is a flat dictionary of tensors: `reset` loads
the initial one, `save` writes the current one, and `load` resumes from it, bit for bit. `stream`
gives further streams a state of their own over the same network.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from twoshift.accuracy import VIEWS
from twoshift.adapters import Scores, score
from twoshift.errors import BatchError, CheckpointError, ModelError, TwoshiftError
from twoshift.methods._batch import MODEL_REFUSALS, checked, expected_input
from twoshift.methods._batch import check_finite as check_finite
from twoshift.methods._compiled import compile_networks, compiler_refusal
from twoshift.methods._inputs import Inputs
from twoshift.methods._state import Places, State, capture, fitting, fixed_names, restore
from twoshift.methods._streams import LiveStream, Streams, check_name
from twoshift.models.classifier import prepare
from twoshift.models.norm import guard_group_norms
from twoshift.registry import Registry, parameters_of
from twoshift.storage import fingerprint


class Method(nn.Module):
    """Predicting on a batch also adapts. The given model is never changed.

    A method may be called from several threads: a lock lets one at a time use the network, for a
    batch or for taking, loading, saving or resetting a state. `stream` gives each of many streams
    a state of its own over this one network; the method itself is one more stream. What is read
    from ``model`` directly belongs to the stream that was used last.

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
        remembers: The names that ``memory`` may have, with their types; None for the model's type.
        not_negative: Buffers of the method that are never below zero.
        fixed_buffers: Buffers of the method that never move, so that no state holds them.
        part: Images of a large batch that it takes in at once, as a batch; None for all.
        inputs: What is known about the images, see `expect`.
        because: Why this method was chosen, if somebody said so; part of `describe`.
    """

    title: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    remembers: ClassVar[Mapping[str, torch.dtype | None]] = {}
    not_negative: ClassVar[frozenset[str]] = frozenset()
    fixed_buffers: ClassVar[frozenset[str]] = frozenset()
    part: ClassVar[int | None] = None
    statistics: str = "running"
    optimizer: torch.optim.Optimizer | None = None
    inputs: Inputs | None = None
    because: str = ""
    _places: Places | None = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        with torch.inference_mode(False):  # the copy must be able to learn
            self.model = prepare(model).eval().requires_grad_(False)
        guard_group_norms(self.model)
        self.generator = torch.Generator()  # the source of every random draw
        self.memory: dict[str, Tensor] = {}
        self._streams = Streams()
        self._named: dict[str, LiveStream[Self]] = {}

    @classmethod
    def statistics_on(cls, model: nn.Module) -> str:
        """Which statistics this method normalises the predictions of ``model`` by."""
        return cls.statistics

    @property
    def view_in_use(self) -> int:
        """Position in `VIEWS` of the statistics that predict: the source's, or the batch's own."""
        return VIEWS.index("source" if self.statistics == "running" else "plain")

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
        # adapting needs gradients, whatever the caller's mode is
        with self._using(), torch.inference_mode(False), torch.enable_grad():
            x = checked(x, self.model, self.inputs)
            before = self._take_state()  # cheap compared with a forward pass
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
                self._put_state(before)
                if isinstance(e, TwoshiftError) or not isinstance(e, MODEL_REFUSALS):
                    raise
                if refusal := compiler_refusal(e):
                    raise refusal from e
                raise BatchError(
                    f"the model cannot take a batch of shape {tuple(x.shape)}: {e}",
                    must_be=expected_input(self.model),
                ) from e
        return logits

    def describe(self) -> str:
        """What is done to predictions, and why, in a line."""
        return f"{self.title}: {self.because}" if self.because else self.title

    def expect(self, inputs: Inputs) -> Self:
        """Refuse batches that are not like ``inputs`` from now on; returns the method.

        Images of another size that are in the memory are forgotten with the next batch.
        """
        self.inputs = inputs
        return self

    def compile(self, **options: Any) -> None:
        """Compile the network by torch.compile, for methods whose time is that of forward passes.

        The next batch takes much longer, half a minute for a ResNet-18, and predictions change by
        rounding, again where a new size of batches makes torch compile anew: they are no longer
        repeated bit for bit. Everything else stays as it is: names, states, `reset`, `save`,
        streams. A method that is loaded is not compiled. What torch has compiled more than
        ``torch._dynamo.config.recompile_limit`` times in a process, it then runs as it is.

        Args:
            options: Options of ``torch.compile``, such as ``mode`` or ``backend``.

        Raises:
            ModelError: Nothing can be compiled here, for example for want of a C++ compiler.
        """
        with self._using():
            compile_networks(self._core.children(), self.device, **options)

    def stream(self, name: str) -> LiveStream[Self]:
        """The stream called ``name``: a state of its own over this network.

        It starts in the state that `reset` returns to. The same name gives the same object, until
        `drop` forgets it.
        """
        name = check_name(name)
        with self._streams.lock:
            kept, known = self._streams.named.get(name), self._named.get(name)
            if known is not None and known._kept is kept:
                return known
            new = LiveStream(self, name, kept or self._streams.add(name, self._core._initial))
            self._named[name] = new
            if kept is None:
                new.reset()
            return new

    @property
    def streams(self) -> list[str]:
        """Names of the streams besides the method's own."""
        return list(self._streams.named)

    def drop(self, name: str) -> None:
        """Forget the stream called ``name``."""
        self._streams.drop(name)
        self._named.pop(name, None)

    def reset(self) -> None:
        """Return exactly to the initial state: weights, statistics, optimiser, random draws."""
        with self._using():
            self._put_state(self._initial)

    def ready(self) -> None:
        """End the construction: remember the state that `reset` returns to."""
        self._places = Places.of(self, list(self.moving()))
        self._initial = self._take_state()

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments without the model: ``create(name, model, **settings)``."""
        names = [n for n in parameters_of(type(self)) if n != "model"]
        values = {n: getattr(self, n) for n in names}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    def moving(self) -> dict[str, Tensor]:
        """Everything that adaptation may change: trained parameters, and buffers unless fixed."""
        trained = {n: p for n, p in self.named_parameters() if p.requires_grad}
        fixed = fixed_names(self)
        return {**trained, **{n: b for n, b in self.named_buffers() if n not in fixed}}

    def _fixed(self) -> dict[str, Tensor]:
        """The buffers that never move."""
        fixed = fixed_names(self)
        return {n: b for n, b in self.named_buffers() if n in fixed}

    def state(self) -> State:
        """A copy of the whole state, as a flat dictionary."""
        with self._using():
            return self._take_state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state, bit for bit; one that does not fit is refused and changes nothing.

        A state of a model in another floating-point type is rounded, with a warning.
        """
        with self._using(), torch.inference_mode(False), torch.no_grad():
            self._put_state(self._fit_state(state))

    def check_memory(self, memory: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Refuse a saved memory whose shapes or values are impossible, by a MismatchError.

        Args:
            memory: What was remembered, by name.
            state: The rest of the state, checked already.
        """

    @property
    def _core(self) -> Method:
        """The method around the network itself."""
        return self

    def _using(self) -> AbstractContextManager[None]:
        """The network for this thread, with the state of the stream whose turn it is."""
        return self._streams.using(self._core)

    def _take_state(self) -> State:
        return capture(self, self._tensors())

    def _fit_state(self, state: Mapping[str, Tensor], quiet: bool = False) -> State:
        return fitting(self, self._tensors(), state, quiet)

    def _put_state(self, state: Mapping[str, Tensor]) -> None:
        with torch.inference_mode(False):
            restore(self, self._tensors(), state)

    def _tensors(self) -> dict[str, Tensor]:
        return self.moving() if self._places is None else self._places.tensors()

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

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of the model, which is that of its images."""
        return next(self.model.parameters()).dtype

    def save(self, folder: str | Path) -> None:
        """Write the whole adaptation state to ``folder``, atomically; the folder may exist."""
        from twoshift.methods._saving import save_method

        with self._streams.saving:
            save_method(self, Path(folder), self.state())

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
        return fingerprint(self._given())

    def _given(self) -> dict[str, Tensor]:
        frozen = {n: p for n, p in self.named_parameters() if not p.requires_grad}
        return {**frozen, **self._fixed(), **self._initial}


methods: Registry[type[Method]] = Registry("method", "twoshift.methods")
