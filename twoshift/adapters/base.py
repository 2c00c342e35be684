"""What an adapter is, and how one is attached to a classifier's head.

An adapter maps a label distribution to a :class:`HeadShift`. `attach` puts it around the head of a
copy of the model, and `condition` sets the label distribution.
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
from twoshift.models.classifier import prepare
from twoshift.models.head import (
    find_head,
    head_candidates,
    size_of,
)
from twoshift.models.norm import replace_module
from twoshift.registry import Registry, parameters_of
from twoshift.storage import fingerprint

ANSWER = "answer"  # a head for adapters that only shift logits: whatever the model returns
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
        shifts_only_logits: Whether it needs no more than the model's answer.
        trained_for: SHA-256 of the weights of the source model that it was trained for, if known.
    """

    mapping: Tensor
    needs_training: ClassVar[bool] = False
    shifts_only_logits: ClassVar[bool] = False
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

    A head that is a 1x1 convolution is adapted at every position. The shift is affine in the
    features, so the mean over positions is that of the shifted logits of the mean features.
    ``prior`` is not in the ``state_dict``: it is the state of a run, not of the model.
    """

    prior: Tensor
    is_classifier_head = True  # find_head stops here, not at the adapter's own linear layers

    def __init__(self, head: nn.Module, adapter: Adapter) -> None:
        super().__init__()
        features, classes = size_of(head)
        if (features, classes) != (adapter.features, adapter.classes):
            raise MismatchError(
                "the adapter",
                must_be=f"for {features} features and {classes} classes",
                got=f"one for {adapter.features} and {adapter.classes}",
                cure="Train one for this model: twoshift train adapter --source DIR.",
            )
        self._hold(head, adapter, features)

    def _hold(self, head: nn.Module, adapter: Adapter, features: int) -> None:
        self.head, self.adapter = head, adapter
        self.in_features, self.out_features = features, adapter.classes
        like = next(iter((*head.parameters(), adapter.mapping)))
        uniform = like.new_full((adapter.classes,), 1 / adapter.classes)
        self.register_buffer("prior", uniform, persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        """Logits for the label distribution last set by `condition`."""
        h = _into(self.head, h)
        if isinstance(self.head, nn.Conv2d):
            return self.shifted(h.movedim(1, -1)).movedim(-1, 1)
        return self.shifted(h)

    def shifted(self, h: Tensor) -> Tensor:
        """Shifted logits of features (..., d)."""
        return shifted_logits(h, *linear_weights(self.head), self.adapter(self.prior))

    def moved(self, raw: Tensor) -> Tensor:
        """Shifted logits of those of the original head, if the adapter only shifts logits."""
        shift = self.adapter(self.prior)
        logits = raw if shift.temperature == 1 else raw / shift.temperature
        return logits if shift.logits is None else logits + shift.logits

    def raw(self, h: Tensor) -> Tensor:
        """Logits of the original head, from features as `capture_features` yields them."""
        if isinstance(self.head, nn.Conv2d):
            return self.head(h[:, :, None, None]).flatten(1)
        return self.head(h)


def linear_weights(head: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight, (C, d), and bias of a linear layer or a 1x1 convolution."""
    assert isinstance(head, nn.Linear | nn.Conv2d)
    return head.weight.flatten(1), head.bias


def _into(head: nn.Module, h: Tensor) -> Tensor:
    """What the head's own hooks make of its input; that of `weight_norm` computes its weights."""
    for i, hook in head._forward_pre_hooks.items():
        if i not in head._forward_pre_hooks_with_kwargs:
            result = hook(head, (h,))
            h = h if result is None else result[0] if isinstance(result, tuple) else result
    return h


class AdaptedAnswer(AdaptedHead):
    """An adapter behind the whole model, for one that only shifts or scales logits."""

    adapts_answer = True  # its input is no feature: find_head looks for a layer first

    def __init__(self, adapter: Adapter) -> None:
        nn.Module.__init__(self)
        if not adapter.shifts_only_logits:
            raise HeadError(
                f"the head of {type(adapter).__name__}",
                must_be="a layer, since it changes features",
                got=repr(ANSWER),
                cure="Name the layer, or use a LogitAdapter.",
            )
        self._hold(nn.Identity(), adapter, adapter.classes)

    def forward(self, h: Tensor, adapt: bool = False) -> Tensor:
        """Logits for the label distribution last set by `condition`, from those of the model.

        Without ``adapt`` it is the identity: an nn.Sequential calls it as one more layer.
        """
        if not adapt:
            return h
        if h.shape[1] != self.out_features:
            must_be = f"for {h.shape[1]} classes, as the model"
            raise MismatchError("the adapter", must_be=must_be, got=self.out_features)
        return self.moved(h)


def attach(model: nn.Module, adapter: Adapter, head: str | None = None) -> nn.Module:
    """A copy of ``model`` whose head is adapted; the given model and adapter are untouched.

    Args:
        model: Any classifier whose last layer is linear or a 1x1 convolution; any classifier at all
            for an adapter that only shifts logits.
        adapter: The adapter trained for it.
        head: Path of the head; needed only if `find_head` cannot find it. `ANSWER` puts an adapter
            that only shifts logits behind the whole model, and is the default for such an adapter
            where no linear layer is found.
    """
    adapted = prepare(model)
    weight = next(adapted.parameters())
    own = copy.deepcopy(adapter).to(weight.device, weight.dtype)
    if goes_to_answer(adapted, adapter, head):
        # in the precision of the answer
        _add_answer(adapted, own.to(torch.promote_types(weight.dtype, torch.float32)))
        return adapted
    name, layer = bare_head(adapted, head)
    if name == "":
        raise HeadError("the model is its own head", cure="Wrap it: nn.Sequential(model).")
    replace_module(adapted, name, AdaptedHead(layer, own).train(model.training))
    return adapted


def goes_to_answer(model: nn.Module, adapter: type[Adapter] | Adapter, head: str | None) -> bool:
    """Whether `attach` puts an adapter behind the whole model, which has none yet."""
    if adapted_head(model) is not None:
        raise HeadError("the model has an adapter already", cure="detach(model) first.")
    if head is not None:
        return head == ANSWER and ANSWER not in model._modules
    heads = [name for name in head_candidates(model) if name]
    linear = any(isinstance(model.get_submodule(name), nn.Linear) for name in heads)
    return adapter.shifts_only_logits and not linear


def _add_answer(model: nn.Module, adapter: Adapter) -> None:
    if hasattr(model, ANSWER):
        what = f"{type(model).__name__} has an attribute of its own called {ANSWER!r}"
        raise HeadError(what, cure="Rename it.")
    model.add_module(ANSWER, AdaptedAnswer(adapter).train(model.training))
    model.register_forward_hook(_adapt_answer)


def _adapt_answer(model: nn.Module, _images: tuple[Any, ...], answer: Tensor) -> Tensor:
    return model.get_submodule(ANSWER)(answer, adapt=True)


def bare_head(model: nn.Module, head: str | None = None) -> tuple[str, nn.Module]:
    """Path and module of the head of a model that has no adapter yet."""
    if adapted_head(model) is not None:
        raise HeadError("the model has an adapter already", cure="detach(model) first.")
    return find_head(model, head)


def detach(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with its original head back."""
    restored = copy.deepcopy(model)
    heads = list(adapted_heads(restored))
    if not heads:
        raise HeadError("the model has no adapter to detach")
    for name, adapted in heads:
        if isinstance(adapted, AdaptedAnswer):
            root = restored.get_submodule(name.rpartition(".")[0])
            del root._modules[ANSWER]
            for i, hook in list(root._forward_hooks.items()):
                if hook is _adapt_answer:
                    del root._forward_hooks[i]
        else:
            replace_module(restored, name, adapted.head)
    return restored


def adapted_heads(module: nn.Module) -> Iterator[tuple[str, AdaptedHead]]:
    """Path and module of every adapted head below ``module``, copies in teachers included."""
    for name, child in module.named_modules():
        if isinstance(child, AdaptedHead):
            yield name, child


def adapted_head(model: nn.Module) -> AdaptedHead | None:
    """The adapted head of a model; None if it has none."""
    modules = [model]
    while modules:  # from the last to the first: a head is one of the last
        if isinstance(last := modules.pop(), AdaptedHead):
            return last
        modules.extend(child for child in last._modules.values() if child is not None)
    return None


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
