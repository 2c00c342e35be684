"""The whole adaptation state on disk: `Method.save` and `Method.load`.

A folder holds the state, the adapter, and a card that names the method, its settings, the estimator
and the model that they belong to. Settings that are tensors, such as facts of the source model,
have a file of their own. Loading takes the bare classifier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from twoshift import estimators, storage
from twoshift.adapters import adapted_heads, attach
from twoshift.adapters._files import describe, rebuild
from twoshift.errors import MismatchError
from twoshift.methods._inputs import Inputs
from twoshift.methods._match import check_model, check_same, renamed, traits
from twoshift.methods._state import State
from twoshift.methods.base import Method, methods
from twoshift.methods.label_aware import LabelAware

KIND = "adaptation state"
STATE, ADAPTER = "state.safetensors", "adapter.safetensors"
INITIAL = "initial.safetensors"  # the state that `reset` returns to
FACTS = "facts.safetensors"  # settings that are tensors


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
    card |= traits(inner)
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
    settings = renamed(card["method"], settings)
    method: Method = methods.create(card["method"], model, **settings)
    check_model(method, card, folder)
    if card.get("inputs") is not None:
        method.expect(Inputs.of_card(card["inputs"]))
    if "estimator" in card:
        settings = storage.join_tensors("estimator", card["estimator"]["settings"], facts)
        method = LabelAware(method, estimators.create(card["estimator"]["name"], **settings))
    method.load_state(storage.read_tensors(card["folder"] / STATE))
    initial = storage.read_tensors(card["folder"] / INITIAL)
    method._initial = method._fit_state(initial, quiet=True)  # a warning was given already
    return method


def read_state(method: Method, folder: Path) -> State:
    """The state in a folder that was saved from the same model and method, with equal settings."""
    card = storage.read_card(folder, KIND)
    facts = storage.read_tensors(card["folder"] / FACTS) if FACTS in card["files"] else {}
    check_same(method, card, facts, folder)
    return storage.read_tensors(card["folder"] / STATE)
