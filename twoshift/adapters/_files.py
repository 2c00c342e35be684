"""Adapters on disk: weights in safetensors, name and settings in a readable card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from twoshift.adapters.base import Adapter, adapters
from twoshift.errors import CheckpointError
from twoshift.storage import build_to_fit, card_of, misfits, read_folder, save_folder

KIND = "adapter"
WEIGHTS = "adapter"
Size = Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    """Settings that every adapter has, beside its own."""

    model_config = ConfigDict(extra="allow")
    features: Size
    classes: Size
    class_counts: list[float] | None = None


class Training(BaseModel):
    """The training of an adapter, as far as it is known."""

    recipe: dict[str, Any] = {}
    seed: int = 0
    source: str | None = None


@card_of(KIND)
class AdapterCard(BaseModel):
    """Fields of an adapter's card."""

    settings: Settings
    name: str | None = None  # those of 0.1.0 have none
    training: Training | None = None


def save_adapter(folder: str | Path, adapter: Adapter, facts: dict[str, Any] | None = None) -> None:
    """Write an adapter with its mapping vector and settings; ``facts`` go into the card."""
    content = {**describe(adapter), **(facts or {})}
    save_folder(folder, KIND, content, {WEIGHTS: adapter.state_dict()})


def load_adapter(folder: str | Path) -> Adapter:
    """Read an adapter back; a damaged one is refused."""
    saved = read_folder(folder, KIND)
    with misfits(folder):
        adapter = rebuild(saved.card, saved.file(WEIGHTS))
    adapter.trained_for = (saved.card.get("training") or {}).get("source")
    return adapter.eval()


def describe(adapter: Adapter) -> dict[str, Any]:
    """Name and settings, as a card holds them."""
    return {"name": adapters.name_of(type(adapter)), "settings": adapter.settings()}


def rebuild(card: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Adapter:
    """The adapter that a card describes; one of another size than its weights is not built."""
    name, settings = card.get("name"), card["settings"]
    if name is None:
        name, settings = current_spelling(settings)
    classes = tuple(weights["mapping"].shape)
    if classes != (settings["classes"],):
        must_be = f"{classes}, as of the saved mapping"
        raise CheckpointError("classes of the adapter", must_be=must_be, got=settings["classes"])
    adapter = build_to_fit(lambda: adapters.create(name, **settings), weights)
    assert isinstance(adapter, Adapter)
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
