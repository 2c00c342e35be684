"""From a request (names, a preset, some settings) to a cell, with every name and setting checked.

The command line, tables and Python code all make their cells here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from twoshift import adapters, estimators, methods
from twoshift.bench import presets
from twoshift.bench.cell import CLEAN, IDENTITY, JOINED, NATURAL, TRAINED, Cell
from twoshift.data.base import datasets
from twoshift.data.corruptions import corruptions
from twoshift.data.orders import check_order
from twoshift.data.schedules import named
from twoshift.errors import PriorError, SettingError, UnknownName
from twoshift.registry import check_numbers, check_settings, did_you_mean, near_miss

DEFAULT = {"method": "tent", "adapter": None, "estimator": "ema"}


def make_cell(
    preset: str | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    estimator_settings: Mapping[str, Any] | None = None,
    with_iabn: bool = False,
    whose: str = "",
    **fields: Any,
) -> Cell:
    """A cell whose settings are those of a preset, with changes.

    Args:
        preset: Name of the preset. It may also name a method, adapter and estimator.
        settings: Settings of the method that differ from the preset's.
        estimator_settings: Settings of the estimator that differ from the preset's.
        with_iabn: Whether the source model has IABN layers.
        whose: Start of error messages, for example ``"row 'TENT': "``.
        fields: Other fields of the cell: ``method``, ``adapter``, ``estimator``, ``labels`` ...
            What is not given comes from the preset, and otherwise has its default.
    """
    names = {**DEFAULT, **presets.combination(preset), **fields}
    method, adapter, estimator = names["method"], names["adapter"], names["estimator"]
    of_method = presets.preset(preset, method, adapter in (TRAINED, IDENTITY), with_iabn)
    of_estimator = presets.estimator_preset(preset, estimator)
    cell = Cell(
        **names,
        settings={**of_method, **(settings or {})},
        estimator_settings={**of_estimator, **(estimator_settings or {})},
    )
    check_cell(cell, whose)
    if cell.uses_estimator:
        return cell
    if estimator != DEFAULT["estimator"] or estimator_settings:
        raise SettingError(
            f"{whose}estimator {estimator!r}",
            must_be="used together with an adapter, which it tells the label distribution",
            cure="Choose an adapter, or leave the estimator out.",
        )
    return replace(cell, estimator_settings={})


def check_cell(cell: Cell, whose: str = "") -> None:
    """Refuse a cell with an unknown name or setting, before anything is loaded.

    Args:
        cell: The cell.
        whose: Start of error messages.
    """
    method, estimator = methods.methods[cell.method], estimators.estimators[cell.estimator]
    check_settings(f"{whose}method {cell.method!r}", method, cell.settings)
    check_settings(f"{whose}estimator {cell.estimator!r}", estimator, cell.estimator_settings)
    kinds = (*untrained_adapters(), TRAINED)
    if cell.adapter is not None and cell.adapter not in kinds:
        cure = near_miss(cell.adapter, kinds)
        raise UnknownName(f"{whose}unknown adapter {cell.adapter!r}", cure=cure)
    check_stream(cell.corruption, cell.labels, cell.order)
    if cell.images is not None:
        check_numbers("the stream", "a whole number from 1", images=cell.images)
    if cell.target is not None:
        datasets[cell.target.partition(":")[0]]


def untrained_adapters() -> list[str]:
    """Names of the adapters that need no training."""
    return [name for name in adapters.adapters if not adapters.adapters[name].needs_training]


def check_stream(corruption: str, labels: str, order: str = "shuffled") -> None:
    """Refuse an unknown corruption, label distribution or order."""
    for name in corruption.split(JOINED):
        if name != CLEAN and name not in corruptions:
            cure = near_miss(name, [CLEAN, *corruptions])
            raise UnknownName(f"unknown corruption {name!r}", cure=cure)
    check_order(order)
    if labels == NATURAL:
        return
    if did_you_mean(labels, [NATURAL]):
        cure = did_you_mean(labels, [NATURAL])
        raise PriorError(f"unknown label distribution {labels!r}", cure=cure)
    named(labels, classes=10)
