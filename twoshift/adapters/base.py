"""The label shift adapter: from a label distribution to a shifted classifier head.

Park et al., "Label Shift Adapter for Test-Time Adaptation under Covariate and Label Shifts",
ICCV 2023. Two small networks read the distribution and produce (gamma, beta) for the features and
(dW, db) for the linear head: logits = (gamma * h + beta)(W + dW) + b + db.

A fresh adapter is the identity: its last layers start at zero and gamma is 1 + output.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from twoshift import priors
from twoshift.errors import CheckpointError, HeadError, MismatchError, SettingError
from twoshift.models.head import find_head
from twoshift.models.norm import replace_module
from twoshift.storage import (
    atomic_folder,
    fingerprint,
    read_card,
    read_tensors,
    write_card,
    write_tensors,
)

KIND = "adapter"
WEIGHTS = "adapter.safetensors"
FORMS = ("class", "rank1", "full", "none")
CONDITIONS = ("scalar", "full", "classwise")
FLOOR = 1e-6  # of a class's share: an estimate of zero must not be final


class HeadShift(NamedTuple):
    """What the adapter does to a head.

    Attributes:
        scale: gamma, (d,), or None for one.
        shift: beta, (d,), or None for zero.
        weight: dW, as factors (C,), (d,) whose outer product it is, or whole, (C, d), or None.
        bias: db, (C,), or None for zero.
        temperature: T, by which the head's own logits are divided.
    """

    scale: Tensor | None
    shift: Tensor | None
    weight: tuple[Tensor, Tensor] | Tensor | None
    bias: Tensor | None
    temperature: float = 1.0


def shifted_logits(h: Tensor, weight: Tensor, bias: Tensor | None, shift: HeadShift) -> Tensor:
    """(gamma * h + beta)(W / T + dW) + b / T + db."""
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
        return F.linear(h, weight + shift.weight, bias)
    logits = F.linear(h, weight, bias)
    if shift.weight is not None:  # never build the d x C matrix of an outer product
        per_class, per_feature = shift.weight
        logits = logits + (h @ per_feature).unsqueeze(-1) * per_class
    return logits


def mapping_vector(class_counts: Sequence[float]) -> Tensor:
    """m: +1 for the class with the most training images, -1 for the rarest, even steps between."""
    order = torch.from_numpy(priors.class_order(class_counts))
    m = torch.empty(len(order))
    m[order] = torch.linspace(1, -1, len(order))
    return m


class LabelShiftAdapter(nn.Module):
    """Hypernetwork from a label distribution to a :class:`HeadShift`.

    Args:
        features: d, the input size of the head.
        classes: C, the number of classes.
        class_counts: Training images per class (or their shares), for the mapping vector; without
            it class 0 counts as the most frequent, as in the long-tailed CIFAR sets.
        dw: Form of dW: ``"class"`` (one number per class, spread evenly over the features),
            ``"rank1"``, ``"full"`` or ``"none"``.
        gamma: Whether to scale the features.
        beta: Whether to shift them.
        db: Whether to shift the bias.
        condition: ``"scalar"`` reads m'pi, the degree of imbalance; ``"full"`` reads pi itself;
            ``"classwise"`` reads (log pi_c, log pi_s,c) of each class with one small network for
            all of them, so that any permutation of the labels is met alike. It shifts logits only
            (no gamma, no beta), and a fresh one is exactly logit adjustment: db = log pi.
        hidden: Size of the hidden layers.
        lambdas: The exponents of the source prior that the outputs model at (source, uniform,
            reversed) labels: pi_s ** lambda; tau of the training loss is 1 - lambda.
        assumes: Of the classwise condition: the label distribution that is in the logits of the
            head. Uniform, the default, is right after balanced softmax; plain cross-entropy
            leaves that of the training images.
        temperature: T, what the head's logits are divided by to be calibrated: a label
            distribution is weighed rightly against them only if they are.
    """

    mapping: Tensor
    source_log: Tensor
    assumed_log: Tensor

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        class_counts: Sequence[float] | None = None,
        dw: str = "class",
        gamma: bool = True,
        beta: bool = True,
        db: bool = True,
        condition: str = "scalar",
        hidden: int = 100,
        lambdas: Sequence[float] = (1.0, 0.0, -2.0),
        assumes: Sequence[float] | None = None,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        if not 0 < temperature < math.inf:
            must_be = "above 0 and finite"
            raise SettingError("temperature of the adapter", must_be=must_be, got=temperature)
        if dw not in FORMS:
            raise SettingError("dw of the adapter", must_be=f"one of {FORMS}", got=repr(dw))
        if condition not in CONDITIONS:
            raise SettingError("condition", must_be=f"one of {CONDITIONS}", got=repr(condition))
        if not (gamma or beta or db or dw != "none"):
            raise SettingError("the adapter", must_be="given at least one of gamma, beta, dw, db")
        classwise = condition == "classwise"
        if classwise and (gamma or beta or not db or dw not in ("class", "none")):
            raise SettingError(
                "a classwise adapter",
                must_be="without gamma and beta, with db, dw 'class' or 'none'",
                got=f"gamma {gamma}, beta {beta}, db {db}, dw {dw!r}",
            )
        if assumes is not None and not classwise:
            raise SettingError("assumes", must_be="given with the classwise condition only")
        if len(lambdas) != 3:
            raise SettingError("lambdas", must_be="three numbers", got=lambdas)
        if class_counts is not None and len(class_counts) != classes:
            raise SettingError(
                "class_counts", must_be=f"of length {classes}", got=f"length {len(class_counts)}"
            )
        self.trained_for: str | None = None  # weights of its source model, where they are known
        self.features, self.classes = features, classes
        self.class_counts = None if class_counts is None else [float(c) for c in class_counts]
        self.dw, self.gamma, self.beta, self.db = dw, gamma, beta, db
        self.condition, self.hidden, self.temperature = condition, hidden, temperature
        self.lambdas = tuple(float(value) for value in lambdas)
        counts = class_counts if class_counts is not None else range(classes, 0, -1)
        self.register_buffer("mapping", mapping_vector(list(counts)))
        self.assumes = None if assumes is None else [float(p) for p in assumes]
        if classwise:
            assumed = priors.uniform(classes) if assumes is None else assumes
            assumed = priors.check_prior(assumed, classes, "assumes of the adapter")
            shares = torch.tensor([float(c) for c in counts])
            centred = (shares / shares.mean()).clamp_min(FLOOR).log()
            self.register_buffer("source_log", centred, persistent=False)
            logs = torch.from_numpy(assumed).float().clamp_min(FLOOR).log()
            self.register_buffer("assumed_log", logs, persistent=False)
        inputs = {"scalar": 1, "full": classes, "classwise": 2}[condition]
        weight_size = {"class": classes, "rank1": classes + features, "full": classes * features}
        self._sizes = [weight_size.get(dw, 0), classes if db else 0]
        if classwise:  # per class, from a network that all share
            self._sizes = [int(dw == "class"), 1]
        self.feature_net = _network(inputs, hidden, features * (gamma + beta))
        self.head_net = _network(inputs, hidden, sum(self._sizes))
        if dw == "rank1" and self.head_net is not None:
            # both factors zero would be a saddle that no gradient leaves
            last = self.head_net[-1]
            assert isinstance(last, nn.Linear)
            nn.init.constant_(last.bias[classes : classes + features], 1 / features)

    def settings(self) -> dict[str, Any]:
        """The arguments that build this adapter again."""
        names = ("class_counts", "dw", "gamma", "beta", "db", "condition", "hidden", "lambdas")
        values = {n: getattr(self, n) for n in ("features", "classes", *names)}
        assumes = {} if self.assumes is None else {"assumes": self.assumes}
        temperature = {} if self.temperature == 1 else {"temperature": self.temperature}
        return {**values, "lambdas": list(self.lambdas), **assumes, **temperature}

    def fingerprint(self) -> str:
        """Hash of the weights: results name the adapter by it."""
        return fingerprint(self.state_dict())

    def degree(self, prior: Tensor) -> Tensor:
        """The degree of imbalance m'pi: +1 is all head, -1 all tail."""
        return prior @ self.mapping

    def forward(self, prior: Tensor) -> HeadShift:
        """The shift of the head for a label distribution of shape (C,)."""
        if self.condition == "classwise":
            return self._classwise(prior)
        read = self.degree(prior).unsqueeze(0) if self.condition == "scalar" else prior
        scale = shift = weight = bias = None
        if self.feature_net is not None:
            outputs = iter(self.feature_net(read).split(self.features))
            scale = 1 + next(outputs) if self.gamma else None
            shift = next(outputs) if self.beta else None
        if self.head_net is not None:
            raw, bias = self.head_net(read).split(self._sizes)
            bias = bias if self.db else None
            weight = self._weight(raw)
        return HeadShift(scale, shift, weight, bias, self.temperature)

    def _classwise(self, prior: Tensor) -> HeadShift:
        logs = prior.clamp_min(FLOOR).log()
        assert self.head_net is not None
        read = torch.stack([logs + math.log(self.classes), self.source_log], 1)
        raw, bias = self.head_net(read).split(self._sizes, 1)
        weight = self._weight(raw.squeeze(1)) if self.dw == "class" else None
        bias = logs - self.assumed_log + bias.squeeze(1)
        return HeadShift(None, None, weight, bias, self.temperature)

    def _weight(self, raw: Tensor) -> tuple[Tensor, Tensor] | Tensor | None:
        if self.dw == "class":
            return raw, raw.new_full((self.features,), 1 / self.features)
        if self.dw == "rank1":
            per_class, per_feature = raw.split([self.classes, self.features])
            return per_class, per_feature
        return raw.view(self.classes, self.features) if self.dw == "full" else None


def _network(inputs: int, hidden: int, outputs: int) -> nn.Sequential | None:
    if outputs == 0:
        return None
    last = nn.Linear(hidden, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), last)


class AdaptedHead(nn.Module):
    """The original head, an adapter, and the label distribution it is told.

    ``prior`` is not in the ``state_dict``: it is the state of a run, not of the model.
    """

    prior: Tensor
    is_classifier_head = True  # find_head stops here, not at the adapter's own linear layers

    def __init__(self, head: nn.Linear, adapter: LabelShiftAdapter) -> None:
        super().__init__()
        if (head.in_features, head.out_features) != (adapter.features, adapter.classes):
            raise MismatchError(
                "the adapter is of another model",
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


def attach(model: nn.Module, adapter: LabelShiftAdapter, head: str | None = None) -> nn.Module:
    """A copy of ``model`` whose head is adapted; the given model and adapter are untouched.

    Args:
        model: Any module with a linear classifier head.
        adapter: The adapter trained for it.
        head: Path of the head, where it cannot be found by itself.
    """
    name, linear = _bare_head(model, head)
    if name == "":
        raise HeadError("the model is its own head", cure="Wrap it: nn.Sequential(model).")
    copied = copy.deepcopy(model)
    own = copy.deepcopy(adapter).to(linear.weight.device, linear.weight.dtype)
    original = copied.get_submodule(name)
    assert isinstance(original, nn.Linear)
    replace_module(copied, name, AdaptedHead(original, own).train(model.training))
    return copied


def _bare_head(model: nn.Module, head: str | None = None) -> tuple[str, nn.Linear]:
    if next(adapted_heads(model), None) is not None:
        raise HeadError("the model has an adapter already", cure="detach(model) first.")
    name, linear = find_head(model, head)
    if not isinstance(linear, nn.Linear):
        raise HeadError(f"head {name!r}", must_be="an nn.Linear", got=type(linear).__name__)
    return name, linear


def logit_adapter(
    model: nn.Module,
    assumes: Sequence[float] | None = None,
    class_counts: Sequence[float] | None = None,
    temperature: float = 1.0,
) -> LabelShiftAdapter:
    """An adapter that is exactly logit adjustment: it adds the logarithm of the distribution.

    Args:
        model: The classifier whose linear head it is for.
        assumes: The label distribution that is in the logits already; by default a uniform one.
        class_counts: Of the training images, where somebody asks for the degree of imbalance.
        temperature: What the logits are divided by to be calibrated.
    """
    _, head = _bare_head(model)
    return LabelShiftAdapter(
        head.in_features,
        head.out_features,
        class_counts=class_counts,
        condition="classwise",
        gamma=False,
        beta=False,
        dw="none",
        assumes=assumes,
        temperature=temperature,
    )


def detach(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with its original head back."""
    copied = copy.deepcopy(model)
    found = list(adapted_heads(copied))
    if not found:
        raise HeadError("the model has no adapter to detach")
    for name, adapted in found:
        replace_module(copied, name, adapted.head)
    return copied


def adapted_heads(module: nn.Module) -> Iterator[tuple[str, AdaptedHead]]:
    """Path and module of every adapted head below ``module``, copies in teachers included."""
    for name, child in module.named_modules():
        if isinstance(child, AdaptedHead):
            yield name, child


@torch.no_grad()
def condition(module: nn.Module, prior: Tensor | ArrayLike) -> None:
    """Tell every adapted head below ``module`` the label distribution."""
    found = [head for _, head in adapted_heads(module)]
    if not found:
        raise HeadError("no adapter to condition", cure="attach(model, adapter) first.")
    for head in found:
        given = prior.detach().cpu() if isinstance(prior, Tensor) else prior
        priors.check_prior(given, head.adapter.classes)
        head.prior.copy_(torch.as_tensor(prior, dtype=head.prior.dtype))


def save_adapter(
    folder: str | Path, adapter: LabelShiftAdapter, facts: dict[str, Any] | None = None
) -> None:
    """Write an adapter with its mapping vector and lambdas; ``facts`` go into the card."""
    with atomic_folder(Path(folder)) as temporary:
        write_tensors(temporary / WEIGHTS, adapter.state_dict())
        write_card(temporary, {"kind": KIND, "settings": adapter.settings(), **(facts or {})})


def load_adapter(folder: str | Path) -> LabelShiftAdapter:
    """Read an adapter back; a damaged one is refused."""
    card = read_card(Path(folder), KIND)
    weights = read_tensors(card["folder"] / WEIGHTS)
    try:
        adapter = LabelShiftAdapter(**card["settings"])
        adapter.load_state_dict(weights)
    except (KeyError, TypeError, RuntimeError, SettingError) as e:
        raise CheckpointError(f"{folder} does not fit its own card: {e}") from e
    adapter.trained_for = card.get("training", {}).get("source")
    return adapter.eval()
