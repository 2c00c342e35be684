"""The method of a cell: the source model's facts, the adapter and the estimator put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twoshift import adapters, estimators, methods
from twoshift.adapters import Adapter, attach
from twoshift.adapters.base import bare_head
from twoshift.bench.cell import TRAINED, Cell
from twoshift.calibration import hand_out, known_facts
from twoshift.data.stream import Stream
from twoshift.errors import SettingError
from twoshift.methods import LabelAware, Method
from twoshift.models.head import size_of
from twoshift.registry import parameters_of
from twoshift.train.checkpoint import SourceModel


def build(cell: Cell, source: SourceModel, adapter: Adapter | None, stream: Stream) -> Method:
    """The method of a cell, around a copy of the source model.

    Args:
        cell: What to build.
        source: The source model.
        adapter: The trained adapter of a cell that wants one.
        stream: The stream, whose label distribution an oracle is given.
    """
    method = methods.methods[cell.method]
    predicts = methods.methods[cell.settings.get("method", cell.method)]  # another one, for dart
    facts = known_facts(source, predicts.statistics_on(source.model))
    settings = hand_out(facts, method, cell.settings)
    if cell.adapter is None:
        return methods.create(cell.method, source.model, **settings)
    if cell.adapter != TRAINED:
        adapter = _untrained(cell.adapter, source, facts)
    if adapter is None:
        raise SettingError("a cell with a trained adapter", must_be="given that adapter")
    live = methods.create(cell.method, attach(source.model, adapter), **settings)
    estimator, chosen = estimators.estimators[cell.estimator], cell.estimator_settings
    if estimator.is_oracle:
        truth = {"prior": stream.prior, "batch_priors": stream.batch_priors}
        wanted = parameters_of(estimator)
        chosen = {**{n: t.tolist() for n, t in truth.items() if n in wanted}, **chosen}
    chosen = hand_out(facts, estimator, chosen, calibrated=True)
    return LabelAware(live, estimators.create(cell.estimator, adapter.classes, **chosen))


def _untrained(name: str, source: SourceModel, facts: Mapping[str, Any]) -> Adapter:
    """An adapter that needs no training, of the size of the source model's head."""
    adapter, head = adapters.adapters[name], bare_head(source.model)[1]
    if adapter.needs_training:
        raise SettingError(
            f"adapter {name!r} of a cell",
            must_be=f"one that needs no training, or {TRAINED!r}",
            cure=f"Train it, and give it to the cell with adapter={TRAINED!r}.",
        )
    return adapters.create(name, *size_of(head), **hand_out(facts, adapter))
