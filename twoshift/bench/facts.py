"""What methods and estimators must know about the source model, from its card and calibration.

A cell names the settings that were chosen; these are facts of the source model, so its weights
decide them and they need no naming.
"""

from __future__ import annotations

from typing import Any

from twoshift import estimators, methods
from twoshift.data.stream import Stream
from twoshift.errors import SettingError
from twoshift.registry import parameters_of
from twoshift.train.calibration import ModeCalibration
from twoshift.train.checkpoint import SourceModel


def method_facts(method: str, source: SourceModel) -> dict[str, Any]:
    """Settings of a method that the source model decides; a cell may override them."""
    card, calibration = source.card, source.calibration
    known: dict[str, Any] = {"source_prior": card.prior.tolist(), "strategy": card.strategy}
    if calibration is not None:
        known |= {"fisher": calibration.fisher, "moments": calibration.moments}
        if method == "cotta":  # other methods have thresholds of another kind
            known["threshold"] = calibration.batch.cotta_threshold
    wanted = parameters_of(methods.methods[method])
    return {k: v for k, v in known.items() if k in wanted and v is not None}


def estimator_facts(
    estimator: str, source: SourceModel, statistics: str, stream: Stream
) -> dict[str, Any]:
    """Settings of an estimator that the source model or, for an oracle, the stream decides.

    Args:
        estimator: Registered name.
        source: The source model.
        statistics: Whose statistics normalise the predictions it reads.
        stream: The stream, for oracles.
    """
    kind = estimators.estimators[estimator]
    if kind.is_oracle:
        return {"prior": stream.prior.tolist()}
    if not kind.reads_unadjusted:
        return {}
    found = calibration(source, statistics, f"estimator {estimator!r} reads")
    return found.settings(estimator)


def calibration(source: SourceModel, statistics: str, whose: str) -> ModeCalibration:
    """That of a statistics mode, which must be there."""
    if source.calibration is None:
        raise SettingError(
            f"{whose} calibrated predictions: the source model",
            must_be="calibrated",
            cure="twoshift calibrate --source DIR",
        )
    return source.calibration.of(statistics)


def has_estimator(method: str) -> bool:
    """Whether a method follows the label distribution by itself, without an adapter."""
    return "estimator" in parameters_of(methods.methods[method])
