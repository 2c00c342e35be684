"""Named test-time settings, one set per benchmark of the paper: ``presets.yaml``."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml

from twoshift import methods
from twoshift.errors import UnknownName
from twoshift.registry import near_miss, signature_settings


@cache
def _table() -> dict[str, Any]:
    text = (resources.files("twoshift.bench") / "presets.yaml").read_text()
    return yaml.safe_load(text)


def names() -> list[str]:
    """All presets."""
    return list(_table())


def of_dataset(dataset: str) -> str | None:
    """The preset for source models trained on a data set or a part of it; None if it has none."""
    whole = dataset.partition(":")[0]
    return next((name for name, p in _table().items() if whole in p["datasets"]), None)


def preset(
    name: str | None, method: str, with_adapter: bool, with_iabn: bool = False
) -> dict[str, Any]:
    """The settings of a method in the preset called ``name``; without a name, none.

    Args:
        name: Name of the preset.
        method: Registered name of the method.
        with_adapter: Whether an adapter is attached.
        with_iabn: Whether the source model has IABN layers.
    """
    known = signature_settings(methods.methods[method])
    content = _named(name)
    settings = {**content.get("methods", {}).get(method, {})}
    if with_iabn:
        settings |= content.get("with_iabn", {}).get(method, {})
    if with_adapter:
        settings |= {k: v for k, v in content.get("with_adapter", {}).items() if k in known}
    return settings


def combination(name: str | None) -> dict[str, str]:
    """The method, adapter and estimator that a preset names; most presets name none."""
    return {**_named(name).get("use", {})}


def estimator_preset(name: str | None, estimator: str) -> dict[str, Any]:
    """The settings of an estimator in the preset called ``name``."""
    return {**_named(name).get("estimator", {}).get(estimator, {})}


def _named(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    if name not in _table():
        raise UnknownName(f"unknown preset {name!r}", cure=near_miss(name, _table()))
    return _table()[name]
