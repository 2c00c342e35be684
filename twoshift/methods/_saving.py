"""The whole adaptation state on disk: `Method.save` and `Method.load`.

A folder holds the state, the adapter, and a card that names the method, its settings, the estimator
and the model that they belong to. Settings that are tensors, such as facts of the source model,
have a file of their own. Loading takes the bare classifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from twoshift import estimators, storage
from twoshift.adapters import adapted_heads, attach
from twoshift.adapters._files import Settings, describe, rebuild
from twoshift.errors import CheckpointError, MismatchError
from twoshift.estimators._window import Windowed
from twoshift.methods._inputs import Inputs
from twoshift.methods._match import check_model, check_same, renamed, traits
from twoshift.methods._state import State
from twoshift.methods.base import Method, methods
from twoshift.methods.label_aware import PREFIX, LabelAware
from twoshift.models.classifier import prepare, spec_of

KIND = "adaptation state"
STATE, ADAPTER = "state", "adapter"
INITIAL = "initial"  # the state that `reset` returns to
FACTS = "facts"  # settings that are tensors
JUDGE = "accuracy_judge"  # of the expected accuracy, among them
Size = Annotated[int, Field(ge=1)]


class AdapterPart(BaseModel):
    """The adapter in the card of a state, where it is attached, and its label distribution."""

    head: str
    settings: Settings
    prior: list[float]
    name: str | None = None


class EstimatorSettings(BaseModel):
    """Settings of an estimator that decide its size, beside its own."""

    model_config = ConfigDict(extra="allow")
    classes: Size
    window: Size = 1


class EstimatorPart(BaseModel):
    """The estimator in the card of a state."""

    name: str
    settings: EstimatorSettings


@storage.card_of(KIND)
class StateCard(BaseModel):
    """Fields of the card of an adaptation state."""

    model: str
    method: str
    settings: dict[str, Any]
    adapter: AdapterPart | None = None
    estimator: EstimatorPart | None = None
    classifier: dict[str, Any] | None = None
    inputs: dict[str, Any] | None = None
    dtype: str | None = None
    sketch: str | None = None
    because: str = ""


def save_method(method: Method, folder: Path, state: State) -> None:
    """Write ``method`` in ``state`` to ``folder``, in one step."""
    settings, facts = storage.split_tensors("method", method.settings())
    card: dict[str, Any] = {"model": method.origin(), "settings": settings}
    inner = method
    if isinstance(method, LabelAware):
        inner, estimator = method.method, method.estimator
        name = estimators.estimators.name_of(type(estimator))
        settings, tensors = storage.split_tensors("estimator", estimator.settings())
        card["estimator"] = {"name": name, "settings": settings}
        facts |= tensors
        if method.accuracy is not None:
            facts[JUDGE] = method.accuracy.judge
    card["method"] = methods.name_of(type(inner))
    card |= {**traits(inner), "classifier": spec_of(inner.model), "because": method.because}
    files: dict[str, Mapping[str, Tensor]] = {STATE: state, INITIAL: method._initial}
    if facts:
        files[FACTS] = facts
    for path, head in adapted_heads(inner.model):
        files[ADAPTER] = head.adapter.state_dict()
        # as it was before the method was built: `reset` returns to it
        prior = inner._initial[f"model.{path}.prior"].tolist()
        card["adapter"] = {"head": path, **describe(head.adapter), "prior": prior}
    storage.save_folder(folder, KIND, card, files)


def load_method(folder: Path, model: nn.Module) -> Method:
    """Build the saved method around the bare classifier and restore its state."""
    saved = storage.read_folder(folder, KIND)
    card, state, initial = saved.card, saved.file(STATE), saved.file(INITIAL)
    with storage.misfits(folder, foreign_only=True):
        model = _prepared(model, card.get("classifier"))
        if card.get("adapter"):
            model = _adapted(model, card["adapter"], saved.file(ADAPTER))
        method = _built(saved, model)
        check_model(method, card, folder)
        if card.get("inputs"):
            method.expect(Inputs.of_card(card["inputs"]))
        if card.get("estimator"):
            method = _label_aware(method, saved)
        method.because = card.get("because", "")
        method.load_state(state)
        method._initial = method._fit_state(initial, quiet=True)  # a warning was given already
    return method


def read_state(method: Method, folder: Path) -> State:
    """The state in a folder that was saved from the same model and method, with equal settings."""
    saved = storage.read_folder(folder, KIND)
    check_same(method, saved.card, saved.tensors.get(FACTS, {}), folder)
    return saved.file(STATE)


def _prepared(model: nn.Module, spec: Mapping[str, Any] | None) -> nn.Module:
    prepared = prepare(model, **(spec or {}))
    if spec is not None and spec_of(prepared) != spec:
        raise MismatchError("the model", must_be=f"prepared for {spec}", got=spec_of(prepared))
    return prepared


def _adapted(model: nn.Module, card: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    if next(adapted_heads(model), None) is not None:
        raise MismatchError(
            "the model", must_be="the bare classifier", got="one with an adapter attached"
        )
    adapter = rebuild(card, weights)
    if len(card["prior"]) != adapter.classes:
        must_be, got = f"of {adapter.classes} classes", f"{len(card['prior'])} numbers"
        raise CheckpointError("the saved label distribution", must_be=must_be, got=got)
    adapted = attach(model, adapter, card["head"])
    for _, head in adapted_heads(adapted):  # not by `condition`, which might refuse a rounded one
        head.prior.copy_(torch.tensor(card["prior"], dtype=head.prior.dtype))
    return adapted


def _facts(saved: storage.Saved) -> dict[str, Tensor]:
    facts = saved.tensors.get(FACTS, {})
    for name, tensor in facts.items():
        if tensor.is_complex():  # a setting would take its real part, with no more than a warning
            raise CheckpointError(f"{name} in {saved.folder}", must_be="real", got=tensor.dtype)
    return facts


def _built(saved: storage.Saved, model: nn.Module) -> Method:
    card = saved.card
    settings = storage.join_tensors("method", card["settings"], _facts(saved))
    method: Method = methods.create(card["method"], model, **renamed(card["method"], settings))
    return method


def _label_aware(method: Method, saved: storage.Saved) -> LabelAware:
    """The method with its estimator; an estimator of another size than its state is not built."""
    card = saved.card["estimator"]
    settings = storage.join_tensors("estimator", card["settings"], _facts(saved))
    kind = estimators.estimators[card["name"]]
    heads = [head for _, head in adapted_heads(method)]
    if heads and settings["classes"] != heads[0].adapter.classes:
        must_be = f"for {heads[0].adapter.classes} classes"
        raise MismatchError("the estimator", must_be=must_be, got=settings["classes"])
    if issubclass(kind, Windowed):
        rows = tuple(saved.file(STATE)[f"{PREFIX}rows"].shape)
        window = settings.get("window", rows[0])
        if (window, settings["classes"]) != rows:
            must_be = f"{rows}, as of the saved predictions"
            got = (window, settings["classes"])
            raise CheckpointError("window and classes of the estimator", must_be=must_be, got=got)
        settings["window"] = window
    estimator = estimators.create(card["name"], **settings)
    return LabelAware(method, estimator, _facts(saved).get(JUDGE))
