"""Whether a saved state belongs to a method: the same model, the same settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from twoshift.errors import MismatchError
from twoshift.estimators import PriorEstimator, estimators
from twoshift.methods._state import State
from twoshift.methods.base import Method, methods
from twoshift.methods.label_aware import LabelAware
from twoshift.models.identity import same_sketch, sketch
from twoshift.registry import signature_settings
from twoshift.storage import join_tensors

RENAMED = {("cotta", "threshold"): "confidence_threshold"}  # settings since 0.1.0


def traits(method: Method) -> dict[str, Any]:
    """What a card says about the model besides its fingerprint."""
    inputs = None if method.inputs is None else method.inputs.card()
    return {"dtype": str(method.dtype), "sketch": sketch(method._given()), "inputs": inputs}


def renamed(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the method called ``name`` under their present names."""
    return {RENAMED.get((name, key), key): value for key, value in settings.items()}


def check_model(method: Method, card: Mapping[str, Any], folder: Path) -> None:
    """Refuse a state of another model; the same one in another floating-point type is taken."""
    if method.origin() == card["model"]:
        return
    rounded = card.get("dtype") != str(method.dtype)
    if not (rounded and same_sketch(card.get("sketch"), sketch(method._given()))):
        raise MismatchError(
            f"the state in {folder} belongs to another model",
            cure="Load it with the same classifier, with its source weights.",
        )


def check_same(method: Method, card: Mapping[str, Any], facts: State, folder: Path) -> None:
    """Refuse a state that was saved from another model or method, or with other settings."""
    inner = method.method if isinstance(method, LabelAware) else method
    owner, name = f"method in {folder}", methods.name_of(type(inner))
    _check_name(owner, name, card["method"])
    settings = renamed(name, join_tensors("method", card["settings"], facts))
    _check_settings(owner, inner, settings)
    estimator = method.estimator if isinstance(method, LabelAware) else None
    saved = card.get("estimator") or {}
    owner = f"estimator in {folder}"
    _check_name(owner, estimator and estimators.name_of(type(estimator)), saved.get("name"))
    if estimator is not None:
        _check_settings(owner, estimator, join_tensors("estimator", saved["settings"], facts))
    check_model(inner, card, folder)


def _check_name(what: str, live: object, saved: object) -> None:
    if live != saved:
        raise MismatchError(what, must_be=live or "none", got=saved or "none")


def _check_settings(what: str, live: Method | PriorEstimator, saved: Mapping[str, Any]) -> None:
    """Refuse settings that differ from those of ``live``; one that is missing has its default."""
    saved = {**signature_settings(type(live)), **saved}
    for key, value in live.settings().items():
        if not _equal(value, saved.get(key)):
            raise MismatchError(f"{key} of the {what}", must_be="as in use", got="another value")


def _equal(a: Any, b: Any) -> bool:
    """Whether two settings are the same, as tensors or as lists."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)
    a, b = (v.tolist() if isinstance(v, Tensor) else v for v in (a, b))
    a, b = (list(v) if isinstance(v, tuple) else v for v in (a, b))
    return bool(a == b)
