"""Adapters on disk: weights in safetensors, name and settings in a readable card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from twoshift.adapters.base import Adapter, adapters
from twoshift.errors import CheckpointError, TwoshiftError
from twoshift.storage import atomic_folder, read_card, read_tensors, write_card, write_tensors

KIND = "adapter"
WEIGHTS = "adapter.safetensors"


def save_adapter(folder: str | Path, adapter: Adapter, facts: dict[str, Any] | None = None) -> None:
    """Write an adapter with its mapping vector and settings; ``facts`` go into the card."""
    with atomic_folder(Path(folder)) as temporary:
        write_tensors(temporary / WEIGHTS, adapter.state_dict())
        write_card(temporary, {"kind": KIND, **describe(adapter), **(facts or {})})


def load_adapter(folder: str | Path) -> Adapter:
    """Read an adapter back; a damaged one is refused."""
    card = read_card(Path(folder), KIND)
    try:
        adapter = rebuild(card, read_tensors(card["folder"] / WEIGHTS))
    except (KeyError, TypeError, RuntimeError, TwoshiftError) as e:
        raise CheckpointError(f"{folder} does not fit its own card: {e}") from e
    adapter.trained_for = card.get("training", {}).get("source")
    return adapter.eval()


def describe(adapter: Adapter) -> dict[str, Any]:
    """Name and settings, as a card holds them."""
    return {"name": adapters.name_of(type(adapter)), "settings": adapter.settings()}


def rebuild(card: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Adapter:
    """The adapter that a card describes."""
    name, settings = card.get("name"), card["settings"]
    if name is None:
        name, settings = current_spelling(settings)
    adapter: Adapter = adapters.create(name, **settings)
    adapter.load_state_dict(dict(weights))
    return adapter


def current_spelling(settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and settings of an adapter of 0.1.0, which had one class for all adapters."""
    if "temperature" in settings:
        raise CheckpointError(
            "an adapter of 0.1.0 with a temperature cannot be read",
            cure="Build it again: logit_adapter(model, temperature=...).",
        )
    if settings.get("condition") != "classwise":
        return "label_shift", dict(settings)
    obsolete = ("condition", "gamma", "beta", "db", "lambdas")
    return "classwise", {k: v for k, v in settings.items() if k not in obsolete}
