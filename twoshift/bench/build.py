"""The method of a cell: facts of the source model, the adapter and the estimator put together."""

from __future__ import annotations

from twoshift import adapters, estimators, methods
from twoshift.adapters import Adapter, attach
from twoshift.adapters.base import bare_head
from twoshift.bench.cell import TRAINED, Cell
from twoshift.calibration import calibration_of, hand_out, known_facts
from twoshift.calibration.facts import CURE, FROM_PREDICTIONS
from twoshift.data.stream import Stream
from twoshift.errors import MismatchError, SettingError
from twoshift.methods import LabelAware, Method
from twoshift.registry import parameters_of
from twoshift.train.checkpoint import SourceModel


def build(cell: Cell, source: SourceModel, adapter: Adapter | None, stream: Stream) -> Method:
    """The method of a cell, around a copy of the source model.

    Args:
        cell: What to build.
        source: The source model.
        adapter: Its trained adapter, where the cell wants one.
        stream: The stream, whose label distribution an oracle is given.
    """
    method = methods.methods[cell.method]
    facts = known_facts(source, method.statistics_on(source.model))
    settings = hand_out(facts, f"method {cell.method!r}", method, cell.settings)
    if cell.adapter is None:
        return methods.create(cell.method, source.model, **settings)
    if cell.adapter != TRAINED:
        adapter = _untrained(cell.adapter, source, facts)
    if adapter is None:
        raise SettingError("a cell with a trained adapter", must_be="given that adapter")
    if adapter.trained_for not in (None, source.weights):
        raise MismatchError(
            "the adapter was trained for other source weights",
            cure="Train one for this source: twoshift train adapter --source DIR --out DIR.",
        )
    live = methods.create(cell.method, attach(source.model, adapter), **settings)
    kind, chosen = estimators.estimators[cell.estimator], dict(cell.estimator_settings)
    if kind.is_oracle:
        chosen.setdefault("prior", stream.prior.tolist())
    _require_calibration(f"estimator {cell.estimator!r}", kind, source)
    chosen = hand_out(facts, f"estimator {cell.estimator!r}", kind, chosen)
    return LabelAware(live, estimators.create(cell.estimator, adapter.classes, **chosen))


def _untrained(name: str, source: SourceModel, facts: dict[str, object]) -> Adapter:
    """An adapter that needs no training, of the size of the source model's head."""
    kind, head = adapters.adapters[name], bare_head(source.model)[1]
    _require_calibration(f"adapter {name!r}", kind, source)
    counts = {"class_counts": source.card.class_counts}
    settings = hand_out(facts, f"adapter {name!r}", kind, counts)
    return adapters.create(name, head.in_features, head.out_features, **settings)


def _require_calibration(owner: str, kind: type, source: SourceModel) -> None:
    """Facts of predictions have defaults that only suit a calibrated model: refuse any other."""
    if FROM_PREDICTIONS.keys() & parameters_of(kind).keys() and calibration_of(source) is None:
        raise SettingError(
            f"{owner} reads calibrated predictions: the source model",
            must_be="calibrated",
            cure=CURE,
        )
