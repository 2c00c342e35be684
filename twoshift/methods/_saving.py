"""The whole adaptation state on disk: `Method.save` and `Method.load`.

A folder holds the state, the adapter, and a card that names the method, its settings, the estimator
and the model that they belong to. Settings that are tensors, such as facts of the source model,
have a file of their own. Loading takes the bare classifier.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twoshift import estimators, storage
from twoshift.adapters import adapted_heads, attach
from twoshift.adapters._files import describe, rebuild
from twoshift.errors import MismatchError, TwoshiftWarning
from twoshift.estimators import PriorEstimator
from twoshift.methods._inputs import Inputs
from twoshift.methods._state import State
from twoshift.methods.base import Method, methods
from twoshift.methods.label_aware import LabelAware
from twoshift.models.identity import same_sketch, sketch
from twoshift.registry import signature_settings

KIND = "adaptation state"
STATE, ADAPTER = "state.safetensors", "adapter.safetensors"
INITIAL = "initial.safetensors"  # the state that `reset` returns to
FACTS = "facts.safetensors"  # settings that are tensors
RENAMED = {("cotta", "threshold"): "confidence_threshold"}  # settings since 0.1.0


def save_method(method: Method, folder: Path, state: State) -> None:
    """Write ``method`` in ``state`` to ``folder``, atomically."""
    settings, facts = storage.split_tensors("method", method.settings())
    card: dict[str, Any] = {"kind": KIND, "model": method.origin(), "settings": settings}
    inner = method
    if isinstance(method, LabelAware):
        inner, estimator = method.method, method.estimator
        name = estimators.estimators.name_of(type(estimator))
        settings, tensors = storage.split_tensors("estimator", estimator.settings())
        card["estimator"] = {"name": name, "settings": settings}
        facts |= tensors
    card["method"] = methods.name_of(type(inner))
    given = inner._given()
    card["dtype"], card["sketch"] = str(inner.dtype), sketch(given)
    card["inputs"] = None if inner.inputs is None else inner.inputs.card()
    with storage.atomic_folder(folder) as temporary:
        storage.write_tensors(temporary / STATE, state)
        storage.write_tensors(temporary / INITIAL, method._initial)
        if facts:
            storage.write_tensors(temporary / FACTS, facts)
        for path, head in adapted_heads(inner.model):
            storage.write_tensors(temporary / ADAPTER, head.adapter.state_dict())
            # as it was before the method was built: `reset` returns to it
            prior = inner._initial[f"model.{path}.prior"].tolist()
            card["adapter"] = {"head": path, **describe(head.adapter), "prior": prior}
        storage.write_card(temporary, card)


def load_method(folder: Path, model: nn.Module) -> Method:
    """Build the saved method around the bare classifier and restore its state."""
    card = storage.read_card(folder, KIND)
    if "adapter" in card:
        if next(adapted_heads(model), None) is not None:
            raise MismatchError(
                "the model", must_be="the bare classifier", got="one with an adapter attached"
            )
        adapter = rebuild(card["adapter"], storage.read_tensors(card["folder"] / ADAPTER))
        model = attach(model, adapter, card["adapter"]["head"])
        for _, head in adapted_heads(model):  # not by `condition`, which might refuse a rounded one
            head.prior.copy_(torch.tensor(card["adapter"]["prior"], dtype=head.prior.dtype))
    facts = storage.read_tensors(card["folder"] / FACTS) if FACTS in card["files"] else {}
    settings = storage.join_tensors("method", card["settings"], facts)
    settings = {RENAMED.get((card["method"], name), name): v for name, v in settings.items()}
    method: Method = methods.create(card["method"], model, **settings)
    _check_model(method, card, folder)
    if card.get("inputs") is not None:
        method.expect(Inputs.of_card(card["inputs"]))
    if "estimator" in card:
        settings = storage.join_tensors("estimator", card["estimator"]["settings"], facts)
        method = LabelAware(method, estimators.create(card["estimator"]["name"], **settings))
    method.load_state(storage.read_tensors(card["folder"] / STATE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TwoshiftWarning)  # said once already
        method._initial = method._fit_state(storage.read_tensors(card["folder"] / INITIAL))
    return method


def read_state(method: Method, folder: Path) -> State:
    """The state in a folder that was saved from the same model and method, with equal settings."""
    card = storage.read_card(folder, KIND)
    facts = storage.read_tensors(card["folder"] / FACTS) if FACTS in card["files"] else {}
    inner = method.method if isinstance(method, LabelAware) else method
    _check_same(f"method in {folder}", methods.name_of(type(inner)), card["method"])
    _check_settings(f"method in {folder}", "method", inner, card["settings"], facts, card["method"])
    estimator = method.estimator if isinstance(method, LabelAware) else None
    name = estimator and estimators.estimators.name_of(type(estimator))
    saved = card.get("estimator", {})
    owner = f"estimator in {folder}"
    _check_same(owner, name, saved.get("name"))
    if estimator is not None:
        _check_settings(owner, "estimator", estimator, saved["settings"], facts, "")
    _check_model(inner, card, folder)
    return storage.read_tensors(card["folder"] / STATE)


def _check_model(method: Method, card: dict[str, Any], folder: Path) -> None:
    """Refuse a state of another model; the same one in another floating-point type is taken."""
    if method.origin() == card["model"]:
        return
    rounded = card.get("dtype") != str(method.dtype)
    if not (rounded and same_sketch(card.get("sketch"), sketch(method._given()))):
        raise MismatchError(
            f"the state in {folder} belongs to another model",
            cure="Load it with the same classifier, with its source weights.",
        )


def _check_settings(
    what: str,
    owner: str,
    live: Method | PriorEstimator,
    plain: dict[str, Any],
    facts: State,
    name: str,
) -> None:
    """Refuse settings that differ from those of ``live``; one that is missing has its default."""
    saved = storage.join_tensors(owner, plain, facts)
    saved = {RENAMED.get((name, key), key): value for key, value in saved.items()}
    saved = {**signature_settings(type(live)), **saved}
    for key, value in live.settings().items():
        if not _equal(value, saved.get(key)):
            raise MismatchError(f"{key} of the {what}", must_be="as in use", got="another value")


def _check_same(what: str, live: object, saved: object) -> None:
    if live != saved:
        raise MismatchError(what, must_be=live or "none", got=saved or "none")


def _equal(a: Any, b: Any) -> bool:
    """Whether two settings are the same, as tensors or as lists."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)
    a, b = (v.tolist() if isinstance(v, Tensor) else v for v in (a, b))
    a, b = (list(v) if isinstance(v, tuple) else v for v in (a, b))
    return bool(a == b)
