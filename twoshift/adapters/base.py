"""What an adapter is, and how one is attached to a classifier's head.

An adapter maps a label distribution to a :class:`HeadShift`. `attach` puts it around the head of a
copy of the model, `condition` sets the label distribution, and `score` runs a forward pass that
returns the logits of the adapted head and those of the original one.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from twoshift import priors
from twoshift.errors import HeadError, MismatchError, SettingError
from twoshift.models.head import capture_features, find_head
from twoshift.models.norm import replace_module
from twoshift.registry import Registry, parameters_of
from twoshift.storage import fingerprint

FLOOR = 1e-6  # smallest share of a class: an estimate of zero must not be final


class HeadShift(NamedTuple):
    """What an adapter changes about a head.

    Attributes:
        scale: gamma, (d,), or None for one.
        shift: beta, (d,), or None for zero.
        weight: dW, whole, (C, d), or as factors (C,) and (d,) of an outer product; None for zero.
        bias: db, (C,), or None for zero.
        logits: Added to the logits of the linear layer, (C,), or None for zero. ``bias`` is added
            within that layer, which rounds differently.
        temperature: T, which divides the head's own logits.
    """

    scale: Tensor | None = None
    shift: Tensor | None = None
    weight: tuple[Tensor, Tensor] | Tensor | None = None
    bias: Tensor | None = None
    logits: Tensor | None = None
    temperature: float = 1.0


def shifted_logits(h: Tensor, weight: Tensor, bias: Tensor | None, shift: HeadShift) -> Tensor:
    """(gamma * h + beta)(W / T + dW) + b / T + db, and ``shift.logits`` added to the result."""
    if shift.temperature != 1:
        weight = weight / shift.temperature
        bias = None if bias is None else bias / shift.temperature
    if shift.scale is not None:
        h = h * shift.scale
    if shift.shift is not None:
        h = h + shift.shift
    if shift.bias is not None:
        bias = shift.bias if bias is None else bias + shift.bias
    if isinstance(shift.weight, Tensor):
        weight = weight + shift.weight
    logits = F.linear(h, weight, bias)
    if isinstance(shift.weight, tuple):  # never build the d x C matrix of an outer product
        per_class, per_feature = shift.weight
        logits = logits + (h @ per_feature).unsqueeze(-1) * per_class
    return logits if shift.logits is None else logits + shift.logits


def mapping_vector(class_counts: Sequence[float]) -> Tensor:
    """m: +1 for the class with the most training images, -1 for the rarest, even steps between."""
    order = torch.from_numpy(priors.class_order(class_counts))
    m = torch.empty(len(order))
    m[order] = torch.linspace(1, -1, len(order))
    return m


class Adapter(nn.Module, ABC):
    """A map from a label distribution to a shift of the head.

    A subclass stores every argument of its constructor under the argument's name and defines
    `forward`. An adapter that needs training starts as the identity or as logit adjustment.

    Args:
        features: d, the input size of the head.
        classes: C, the number of classes.
        class_counts: Training images per class (or their shares), for the mapping vector; without
            them class 0 counts as the most frequent, as in the long-tailed CIFAR sets.

    Attributes:
        mapping: m, the position of each class between head (+1) and tail (-1).
        needs_training: Whether its weights must be trained for a source model.
        trained_for: SHA-256 of the weights of the source model that it was trained for, if known.
    """

    mapping: Tensor
    needs_training: ClassVar[bool] = False
    trained_for: str | None = None

    def __init__(
        self, features: int, classes: int, class_counts: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        if class_counts is not None and len(class_counts) != classes:
            raise SettingError(
                "class_counts", must_be=f"of length {classes}", got=f"length {len(class_counts)}"
            )
        self.features, self.classes = features, classes
        self.class_counts = None if class_counts is None else [float(c) for c in class_counts]
        self.register_buffer("mapping", mapping_vector(self.counts()))

    @abstractmethod
    def forward(self, prior: Tensor) -> HeadShift:
        """The shift of the head for a label distribution of shape (C,)."""

    def unbiased(self, raw: Tensor) -> Tensor:
        """Logits of the head without the label distribution that the adapter knows they contain.

        Args:
            raw: Logits of the original head, (B, C).
        """
        return raw

    def counts(self) -> list[float]:
        """Training images per class; descending from class 0 where they are unknown."""
        return self.class_counts or [float(c) for c in range(self.classes, 0, -1)]

    def degree(self, prior: Tensor) -> Tensor:
        """The degree of imbalance m'pi: +1 is all head, -1 all tail."""
        return prior @ self.mapping

    def settings(self) -> dict[str, Any]:
        """The arguments that build this adapter again."""
        values = {name: getattr(self, name) for name in parameters_of(type(self))}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def fingerprint(self) -> str:
        """Hash of the weights, by which results name the adapter."""
        return fingerprint(self.state_dict())


adapters: Registry[type[Adapter]] = Registry("adapter", "twoshift.adapters")


class AdaptedHead(nn.Module):
    """The original head, an adapter, and the label distribution to adapt to.

    ``prior`` is not in the ``state_dict``: it is the state of a run, not of the model.
    """

    prior: Tensor
    is_classifier_head = True  # find_head stops here, not at the adapter's own linear layers

    def __init__(self, head: nn.Linear, adapter: Adapter) -> None:
        super().__init__()
        if (head.in_features, head.out_features) != (adapter.features, adapter.classes):
            raise MismatchError(
                "the adapter",
                must_be=f"for {head.in_features} features and {head.out_features} classes",
                got=f"one for {adapter.features} and {adapter.classes}",
                cure="Train one for this model: twoshift train adapter --source DIR.",
            )
        self.head, self.adapter = head, adapter
        self.in_features, self.out_features = head.in_features, head.out_features
        uniform = head.weight.new_full((adapter.classes,), 1 / adapter.classes)
        self.register_buffer("prior", uniform, persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        """Logits for the label distribution last set by `condition`."""
        return shifted_logits(h, self.head.weight, self.head.bias, self.adapter(self.prior))


class Scores(NamedTuple):
    """The result of a forward pass.

    Attributes:
        logits: Logits of the model, (B, C).
        raw: Logits of its original head, which estimators of the label distribution may read; the
            same tensor where no adapter is attached.
    """

    logits: Tensor
    raw: Tensor

    @staticmethod
    def cat(parts: Sequence[Scores]) -> Scores:
        """The scores of several passes, one after the other."""
        return Scores(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def score(model: nn.Module, x: Tensor) -> Scores:
    """A forward pass; the logits of the original head carry no gradient."""
    head = _adapted_head(model)
    if head is None:
        logits = model(x)
        return Scores(logits, logits)
    with capture_features(head) as features:
        logits = model(x)
    with torch.no_grad():
        return Scores(logits, head.head(features[0]))


def unbiased(model: nn.Module, raw: Tensor) -> Tensor:
    """Raw logits of a model without the label distribution that its adapter knows they contain."""
    head = _adapted_head(model)
    return raw if head is None else head.adapter.unbiased(raw)


def attach(model: nn.Module, adapter: Adapter, head: str | None = None) -> nn.Module:
    """A copy of ``model`` whose head is adapted; the given model and adapter are untouched.

    Args:
        model: Any module with a linear classifier head.
        adapter: The adapter trained for it.
        head: Path of the head; needed only if `find_head` cannot find it.
    """
    name, linear = bare_head(model, head)
    if name == "":
        raise HeadError("the model is its own head", cure="Wrap it: nn.Sequential(model).")
    adapted = copy.deepcopy(model)
    own = copy.deepcopy(adapter).to(linear.weight.device, linear.weight.dtype)
    original = adapted.get_submodule(name)
    assert isinstance(original, nn.Linear)
    replace_module(adapted, name, AdaptedHead(original, own).train(model.training))
    return adapted


def bare_head(model: nn.Module, head: str | None = None) -> tuple[str, nn.Linear]:
    """Path and module of the linear head of a model that has no adapter yet."""
    if _adapted_head(model) is not None:
        raise HeadError("the model has an adapter already", cure="detach(model) first.")
    name, linear = find_head(model, head)
    if not isinstance(linear, nn.Linear):
        raise HeadError(f"head {name!r}", must_be="an nn.Linear", got=type(linear).__name__)
    return name, linear


def detach(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with its original head back."""
    restored = copy.deepcopy(model)
    heads = list(adapted_heads(restored))
    if not heads:
        raise HeadError("the model has no adapter to detach")
    for name, adapted in heads:
        replace_module(restored, name, adapted.head)
    return restored


def adapted_heads(module: nn.Module) -> Iterator[tuple[str, AdaptedHead]]:
    """Path and module of every adapted head below ``module``, copies in teachers included."""
    for name, child in module.named_modules():
        if isinstance(child, AdaptedHead):
            yield name, child


def _adapted_head(model: nn.Module) -> AdaptedHead | None:
    return next((head for _, head in adapted_heads(model)), None)


@torch.no_grad()
def condition(module: nn.Module, prior: Tensor | ArrayLike) -> None:
    """Set the label distribution of every adapted head below ``module``."""
    heads = [head for _, head in adapted_heads(module)]
    if not heads:
        raise HeadError("no adapter to condition", cure="attach(model, adapter) first.")
    values = prior.detach().cpu() if isinstance(prior, Tensor) else prior
    for head in heads:
        priors.check_prior(values, head.adapter.classes)
        head.prior.copy_(torch.as_tensor(prior, dtype=head.prior.dtype))
