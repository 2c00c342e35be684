"""The whole adaptation state on disk: `Method.save` and `Method.load`.

A folder with the state, the adapter, and a card that names the method, its settings, the
estimator and the model it all belongs to. Loading takes the bare classifier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from twoshift import estimators
from twoshift.adapters import LabelShiftAdapter, adapted_heads, attach
from twoshift.errors import MismatchError
from twoshift.methods.base import Method, methods
from twoshift.methods.label_aware import LabelAware
from twoshift.storage import atomic_folder, read_card, read_tensors, write_card, write_tensors

KIND = "adaptation state"
STATE, ADAPTER = "state.safetensors", "adapter.safetensors"
INITIAL = "initial.safetensors"  # what `reset` goes back to


def save_method(method: Method, folder: Path) -> None:
    """Write ``method`` to ``folder``, atomically."""
    card: dict[str, Any] = {"kind": KIND, "model": method.origin(), "settings": method.settings()}
    inner = method
    if isinstance(method, LabelAware):
        inner, estimator = method.method, method.estimator
        name = estimators.estimators.name_of(type(estimator))
        card["estimator"] = {"name": name, "settings": estimator.settings()}
    card["method"] = methods.name_of(type(inner))
    with atomic_folder(folder) as temporary:
        write_tensors(temporary / STATE, method.state())
        write_tensors(temporary / INITIAL, method._initial)
        for path, head in adapted_heads(inner.model):
            write_tensors(temporary / ADAPTER, head.adapter.state_dict())
            # told before the method was built: what `reset` goes back to
            told = inner._initial[f"model.{path}.prior"].tolist()
            card["adapter"] = {"head": path, "settings": head.adapter.settings(), "prior": told}
        write_card(temporary, card)


def load_method(folder: Path, model: nn.Module) -> Method:
    """Build the saved method around the bare classifier and put its state back."""
    card = read_card(folder, KIND)
    if "adapter" in card:
        if next(adapted_heads(model), None) is not None:
            raise MismatchError(
                "the model", must_be="the bare classifier", got="one with an adapter attached"
            )
        adapter = LabelShiftAdapter(**card["adapter"]["settings"])
        adapter.load_state_dict(read_tensors(card["folder"] / ADAPTER))
        model = attach(model, adapter, card["adapter"]["head"])
        for _, head in adapted_heads(model):  # as it was, to the last bit: not checked or rounded
            head.prior.copy_(torch.tensor(card["adapter"]["prior"], dtype=head.prior.dtype))
    method: Method = methods.create(card["method"], model, **card["settings"])
    if method.origin() != card["model"]:
        raise MismatchError(
            f"the state in {folder} belongs to another model",
            cure="Give the classifier it was made from, with its source weights.",
        )
    if "estimator" in card:
        estimator = estimators.create(card["estimator"]["name"], **card["estimator"]["settings"])
        method = LabelAware(method, estimator)
    method.load_state(read_tensors(card["folder"] / STATE))
    method._initial = read_tensors(card["folder"] / INITIAL)
    return method
