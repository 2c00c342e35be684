"""Which settings of a cell are in its key, so that later versions find old records.

A key holds settings. ``keyed.json`` lists those that existed in version 0.1.0, and those of later
methods and estimators when their first records were published. A listed setting is always in a key,
so that another default makes another key. A setting that was added later is in a key only when it
differs from its default, with which old records were measured. A method or estimator that is not
listed, because it is new or a user's own, has all its settings in its keys.

Facts of a source model follow from its weights: they are in a key only where the cell sets them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from twoshift.calibration.facts import fact_names
from twoshift.registry import signature_settings
from twoshift.train.recipes import AdapterRecipe, SourceRecipe

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@cache
def listed() -> dict[str, Any]:
    """The settings of version 0.1.0: of cells, recipes, methods and estimators."""
    text = (resources.files("twoshift.bench") / "keyed.json").read_text()
    return json.loads(text)


def keyed_settings(
    kind: str, name: str, entry: Callable[..., Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a method or estimator that are in a key.

    Args:
        kind: ``"methods"`` or ``"estimators"``.
        name: Registered name.
        entry: The class.
        given: The settings of the cell.
    """
    facts = fact_names()
    defaults = {k: v for k, v in signature_settings(entry).items() if k not in facts}
    return _keyed(listed()[kind].get(name), {**defaults, **given}, defaults)


def keyed_source(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a source recipe that are in a key."""
    return _keyed(listed()["source_recipe"], recipe, _recipe_defaults(SourceRecipe))


def keyed_adapter(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an adapter recipe that are in a key."""
    return _keyed(listed()["adapter_recipe"], recipe, _recipe_defaults(AdapterRecipe))


def keyed_fields(kind: str, instance: DataclassInstance) -> dict[str, Any]:
    """The fields of a cell or model that are in a key.

    Args:
        kind: ``"cell"`` or ``"model"``.
        instance: The cell or model.
    """
    defaults = {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in fields(instance)
    }
    return _keyed(listed()[kind], vars(instance), defaults)


def _keyed(
    names: Collection[str] | None, values: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    def is_default(name: str) -> bool:
        # compared as JSON: () and [] are the same setting
        return name in defaults and json.dumps(values[name]) == json.dumps(defaults[name])

    return {k: v for k, v in values.items() if names is None or k in names or not is_default(k)}


@cache
def _recipe_defaults(recipe: type[SourceRecipe] | type[AdapterRecipe]) -> dict[str, Any]:
    return {
        name: field.get_default(call_default_factory=True)
        for name, field in recipe.model_fields.items()
        if not field.is_required()
    }
