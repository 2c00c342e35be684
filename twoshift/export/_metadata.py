"""What an exported file says about itself: classes, facts, and the label estimate to go on with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from twoshift import __version__
from twoshift.adapters import (
    Adapter,
    CalibratedAdapter,
    IdentityAdapter,
    LogitAdapter,
    adapted_heads,
)
from twoshift.calibration import Calibration
from twoshift.errors import SettingError
from twoshift.estimators import Paced
from twoshift.export.labels import ESTIMATE, KEPT, PACE, packed
from twoshift.methods import LabelAware
from twoshift.methods.label_aware import PREFIX

LISTS = ("assumes", "source_prior", "class_counts")  # facts that are no single numbers


def metadata_of(
    live: LabelAware, facts: Calibration | None, classes: Sequence[str] | None
) -> dict[str, str]:
    """The metadata of a snapshot, by name; the state must not change meanwhile.

    Args:
        live: The snapshot.
        facts: The calibration of its model.
        classes: Names of the classes; those of the calibration by default.
    """
    known = None if facts is None or facts.classifier is None else facts.classifier.classes
    names = known if classes is None else classes
    texts = {
        "twoshift.version": __version__,
        "twoshift.method": live.describe(),
        "twoshift.model": live.origin(),
        "twoshift.label_distribution": json.dumps(live.prior.tolist()),
    }
    if names is not None:
        if len(names) != live.estimator.classes:
            must_be = f"{live.estimator.classes}, one for each class of the model"
            raise SettingError("names of the classes", must_be=must_be, got=len(names))
        texts["twoshift.classes"] = json.dumps(list(names))
    if live.inputs is not None:
        texts["twoshift.inputs"] = json.dumps(live.inputs.card())
    if live.expected_accuracy is not None:
        texts["twoshift.expected_accuracy"] = json.dumps(live.expected_accuracy._asdict())
    if facts is not None:
        texts["twoshift.facts"] = json.dumps(_plain(facts))
    return texts | _estimate(live)


def _plain(facts: Calibration) -> dict[str, Any]:
    """The facts that are numbers."""
    running = facts.of("running")
    numbers = {n: v for n, v in running.items() if isinstance(v, bool | int | float)}
    lists = {n: list(running[n]) for n in LISTS if running.get(n) is not None}
    return {**numbers, **lists, "held_out": facts.held_out, "source": facts.source}


def _estimate(live: LabelAware) -> dict[str, str]:
    """What `LabelEstimate` reads; nothing for estimators and adapters that need torch."""
    estimator, adapter = live.estimator, next(h.adapter for _, h in adapted_heads(live.model))
    if not isinstance(estimator, Paced) or not isinstance(adapter, IdentityAdapter | LogitAdapter):
        return {}
    state = live.state()
    names = [n.removeprefix(PREFIX) for n in state if n.startswith(PREFIX)]
    kept = {n: state[f"{PREFIX}{n}"].cpu().numpy() for n in names if n != "present"}
    settings = json.dumps({**_settings(live, estimator), **_adjusting(adapter)})
    return {ESTIMATE: settings, KEPT: packed(kept)}


def _settings(live: LabelAware, estimator: Paced) -> dict[str, Any]:
    classes = estimator.classes
    even = [1 / classes] * classes
    bias = np.zeros(classes) if estimator.bias is None else estimator.bias.numpy()
    estimator.view = live.view_in_use
    return {
        "classes": classes,
        **{name: getattr(estimator, name) for name in (*PACE, "steps")},
        "pseudo_count": estimator.pseudo_count / classes,
        "temperature": estimator.temperature,
        "bias": bias.tolist(),
        "model_prior": estimator.model_prior or even,
        "relative": estimator.uses_relative,
        "contained": estimator.contained.tolist(),
    }


def _adjusting(adapter: Adapter) -> Mapping[str, Any]:
    """How logits are adjusted: raw / divisor + log prior - assumed_log, unless they stay."""
    assumed, adjusts = [0.0] * adapter.classes, isinstance(adapter, LogitAdapter)
    if isinstance(adapter, LogitAdapter) and adapter.assumes is not None:
        assumed = adapter.assumed_log.tolist()
    divisor = adapter.temperature if isinstance(adapter, CalibratedAdapter) else 1.0
    return {"adjusts": adjusts, "divisor": divisor, "assumed_log": assumed}
