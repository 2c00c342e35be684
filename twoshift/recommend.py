"""The recommended combination, ready to use: matched statistics, logit adjustment, and EM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from twoshift.adapters import ANSWER, IdentityAdapter, attach, logit_adapter
from twoshift.calibration import Calibration
from twoshift.calibration.classifier import Classifier
from twoshift.errors import SettingError
from twoshift.estimators import EM
from twoshift.methods import LabelAware, Matched, Method, Source
from twoshift.models.classifier import prepare
from twoshift.registry import check_settings
from twoshift.storage import misfits

FAIR = "no label distribution in the logits"
BIASED = "minus the label distribution of the training"
AGAIN = "Calibrate the model again: twoshift.calibrate(model, batches)."


def recommended(
    model: nn.Module,
    facts: Calibration | str | Path,
    *,
    head: str | None = None,
    **settings: Any,
) -> LabelAware:
    """The combination that did best in our measurements, for any calibrated classifier.

    Where it is not known to be safe, predictions are left as they are, and ``describe()`` says why:
    without batch normalisation that can be matched, and after a calibration on images that the
    model was trained on. The label distribution is estimated all the same.

    Args:
        model: The classifier that was calibrated; it is not changed.
        facts: What `calibrate` found, or the folder where it was saved.
        head: Path of the classifier head, if another than the calibration found.
        settings: Settings of `Matched`.
    """
    if not isinstance(facts, Calibration):
        facts = Calibration.load(facts)
    if facts.classifier is None:
        raise SettingError(
            "facts of recommended",
            must_be="made by twoshift.calibrate, or in the folder of a source model",
            cure="Calibrate the model: twoshift.calibrate(model, batches).",
        )
    check_settings("recommended", Matched, settings)
    with misfits("the calibration", cure=AGAIN, foreign_only=True):  # somebody may have edited it
        return _built(model, facts, facts.classifier, head, settings)


def _built(
    model: nn.Module,
    facts: Calibration,
    classifier: Classifier,
    head: str | None,
    settings: dict[str, Any],
) -> LabelAware:
    net, known = prepare(model, **classifier.prepared), facts.of("running")
    classifier.check(net)
    head = classifier.head if head is None else head
    classes, temperature = len(known["bias"]), known["temperature"]
    estimator = EM(classes, temperature=temperature, bias=known["bias"])
    reason = _reason_to_do_nothing(facts)
    method: Method
    if reason:
        method = Source(attach(net, IdentityAdapter(classes, classes), ANSWER))
    else:
        adapter = logit_adapter(
            net, known["assumes"], temperature=temperature, head=head, classes=classes
        )
        method = Matched(attach(net, adapter, head), known["moments"], **settings)
        labels = FAIR if known["assumes"] is None else BIASED
        reason = f"temperature {temperature:.2f}, {labels}"
    live = LabelAware(method, estimator)
    live.because = reason
    if classifier.inputs is not None:
        live.expect(classifier.inputs)
    return live


def _reason_to_do_nothing(facts: Calibration) -> str:
    """Why nothing can be adjusted safely; empty if it can."""
    if facts.facts.get("moments") is None:
        return "no batch normalisation that could be matched, so predictions are left as they are"
    if not facts.held_out:
        return (
            "calibrated on images that the model was probably trained on, so predictions are left "
            "as they are; calibrate with held_out="
        )
    return ""
