"""DART: a small network, trained on source images, refines the predictions of any method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.adapters import Scores, adapted_heads, detach
from twoshift.errors import ModelError, SettingError
from twoshift.methods._inputs import Inputs
from twoshift.methods._state import State
from twoshift.methods.base import Method, methods
from twoshift.methods.bn_stats import BNStats
from twoshift.models.classifier import prepare
from twoshift.models.head import class_count
from twoshift.models.norm import use_batch_statistics
from twoshift.registry import parameters_of

MOST_CLASSES = 100
PARTS = ("hidden_weight", "hidden_bias", "out_weight", "out_bias")


@methods.register("dart")
class Dart(Method):
    """The logits of another method, through an affine map that depends on the batch's labels.

    The frozen source network predicts every batch under the batch's own statistics. From the mean
    of these predictions and from how far they are from uniform, a small network reads the matrix
    and the vector that undo what such labels do to predictions. It was trained on source images
    whose labels were drawn to shift. Nothing of it moves; the state is that of the other method.

    Args:
        model: The classifier.
        dart: The small network, as `twoshift.calibration.fit_dart` trains it.
        method: Name of the method whose logits are refined.
        method_settings: Settings of that method.
        fisher: A fact that is passed on if that method takes it.
        moments: The same.
        confidence_threshold: The same.
    """

    title = "DART"
    reference = (
        "Jang et al., Label distribution shift-aware prediction refinement for test-time "
        "adaptation, 2024, https://arxiv.org/abs/2411.15204"
    )
    needs = frozenset({"labelled source images (to train the refinement)"})
    statistics = "batch"
    hidden_weight: Tensor
    hidden_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor

    def __init__(
        self,
        model: nn.Module,
        dart: Mapping[str, Tensor] | None = None,
        method: str = "bn_stats",
        method_settings: Mapping[str, Any] | None = None,
        fisher: Mapping[str, Tensor] | None = None,
        moments: Mapping[str, Tensor] | None = None,
        confidence_threshold: float | None = None,
    ) -> None:
        nn.Module.__init__(self)  # no second copy of the method's model
        kind, chosen = _wrapped(method), _chosen(method_settings)
        facts: dict[str, Any] = {
            "fisher": fisher,
            "moments": moments,
            "confidence_threshold": confidence_threshold,
        }
        used = {n: f for n, f in facts.items() if f is not None and n in parameters_of(kind)}
        self.inner: Method = methods.create(method, model, **{**used, **chosen})
        self.method, self.method_settings = method, chosen or None
        # kept only if it is used: statistics of every class are large
        self.fisher, self.moments, self.confidence_threshold = (used.get(n) for n in facts)
        self.statistics = self.inner.statistics
        # BN stats has made that pass already
        self.network = None if kind is BNStats else source_network(model)
        for name, tensor in _checked(dart, check_classes(self.model)).items():
            dtype = torch.promote_types(self.dtype, torch.float32)
            self.register_buffer(name, tensor.to(self.device, dtype))
        self.generator, self.optimizer = self.inner.generator, self.inner.optimizer
        self._streams, self._named = self.inner._streams, {}
        self.ready()

    def adapt(self, x: Tensor) -> Scores:
        """Let the method predict and adapt, then refine its logits; the raw ones stay."""
        scores = self.inner.adapt(x)
        with torch.no_grad():
            seen = scores.raw if self.network is None else self.network(x)
            weight, bias = refinement(self.dart, batch_summary(seen))
            return scores._replace(logits=scores.logits.detach() @ weight + bias, features=None)

    @property
    def dart(self) -> dict[str, Tensor]:
        """The small network, by the names of its parts."""
        return {name: self.get_buffer(name) for name in PARTS}

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        """The model of the method."""
        return self.inner.model

    @property
    def view_in_use(self) -> int:
        """Which statistics predict, as the method says."""
        return self.inner.view_in_use

    @property
    def memory(self) -> dict[str, Tensor]:  # type: ignore[override]
        """What the method remembers."""
        return self.inner.memory

    @property
    def remembers(self) -> Mapping[str, torch.dtype | None]:  # type: ignore[override]
        """The names that its memory may have, with their types."""
        return self.inner.remembers

    @property
    def inputs(self) -> Inputs | None:  # type: ignore[override]
        """What is known about the images."""
        return self.inner.inputs

    def expect(self, inputs: Inputs) -> Self:
        """Refuse batches that are not like ``inputs`` from now on."""
        self.inner.expect(inputs)
        return self

    def compile(self, **options: Any) -> None:
        """Compile both networks, as `Method.compile` does."""
        super().compile(**options)
        if self.network is not None:
            self.network.compile(**options)

    def describe(self) -> str:
        """What is done to predictions, and why, in a line."""
        parts = f"{self.title} after {self.inner.title}"
        return f"{parts}: {self.because}" if self.because else parts

    def moving(self) -> dict[str, Tensor]:
        """What the method moves."""
        return self.inner.moving()

    @property
    def _core(self) -> Method:
        return self.inner._core

    def _take_state(self) -> State:
        return self.inner._take_state()

    def _fit_state(self, state: Mapping[str, Tensor], quiet: bool = False) -> State:
        return self.inner._fit_state(state, quiet)

    def _put_state(self, state: Mapping[str, Tensor]) -> None:
        self.inner._put_state(state)

    def _given(self) -> State:
        return self.inner._given()


def source_network(model: nn.Module) -> nn.Module:
    """A frozen copy of ``model`` without adapter that uses the batch's statistics."""
    with torch.inference_mode(False):
        net = prepare(model).eval().requires_grad_(False)
        net = detach(net) if any(adapted_heads(net)) else net
        use_batch_statistics(net)
    return net


def batch_summary(logits: Tensor) -> Tensor:
    """Mean prediction of a batch, and its mean cross-entropy from the uniform one: (C + 1,)."""
    log_p = logits.log_softmax(1)
    return torch.cat([log_p.exp().mean(0), -log_p.mean()[None]])


def refinement(dart: Mapping[str, Tensor], summary: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix (C, C) and the vector (C,) that refine the logits of a batch."""
    classes = len(summary) - 1
    hidden = F.linear(summary, dart["hidden_weight"], dart["hidden_bias"]).relu()
    change, bias = F.linear(hidden, dart["out_weight"], dart["out_bias"]).split(
        [classes**2, classes]
    )
    identity = torch.eye(classes, dtype=change.dtype, device=change.device)
    return identity + change.view(classes, classes), bias


def check_classes(model: nn.Module) -> int:
    """The number of classes, or an error if there are too many to refine."""
    classes = class_count(model)
    if classes > MOST_CLASSES:
        raise ModelError(
            f"classes of {type(model).__name__} for dart",
            must_be=f"at most {MOST_CLASSES}: it predicts a matrix of classes by classes",
            got=classes,
            cure="Use an adapter and a label estimate: LabelAware.",
        )
    return classes


def _wrapped(name: str) -> type[Method]:
    if name == "dart":
        raise SettingError("method of dart", must_be="another method", got=repr(name))
    return methods[name]


def _chosen(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    if settings is not None and not isinstance(settings, Mapping):
        must_be, got = "settings by name", repr(settings)
        raise SettingError("method_settings of dart", must_be=must_be, got=got)
    return dict(settings or {})


def _checked(dart: Mapping[str, Tensor] | None, classes: int) -> dict[str, Tensor]:
    cure = "Train it with fit_dart(model, source_batches) or `twoshift calibrate --also dart`."
    if dart is None:
        raise SettingError("dart of dart", must_be="given", got="None", cure=cure)
    tensors = {name: torch.as_tensor(dart.get(name, ()), device="cpu") for name in PARTS}
    hidden, out = len(tensors["hidden_bias"]), classes**2 + classes
    shapes = [(hidden, classes + 1), (hidden,), (out, hidden), (out,)]
    for (name, tensor), shape in zip(tensors.items(), shapes, strict=True):
        if tensor.shape != shape or not tensor.isfinite().all():
            must_be, got = f"finite, {shape}", f"shape {tuple(tensor.shape)}"
            raise SettingError(f"{name} of dart", must_be=must_be, got=got, cure=cure)
    return tensors
