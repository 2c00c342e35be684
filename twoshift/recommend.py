"""The recommended combination, ready to use: streamed statistics, logit adjustment, any pace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from twoshift.adapters import ANSWER, IdentityAdapter, attach, logit_adapter
from twoshift.calibration import Calibration, hand_out
from twoshift.calibration.classifier import Classifier
from twoshift.errors import SettingError
from twoshift.estimators import Paced
from twoshift.methods import LabelAware, Method, Source, Streamed
from twoshift.models.classifier import prepare
from twoshift.registry import check_settings
from twoshift.storage import misfits

FAIR = "no label distribution in the logits"
BIASED = "minus the label distribution of the training"
AGAIN = "Calibrate the model again: twoshift.calibrate(model, batches)."
TRAINED_ON = (
    "calibrated on images that the model was probably trained on, so predictions are left as they "
    "are; calibrate with held_out="
)
ONLY_CHANGES = "no batch normalisation, so only changes of the labels adjust predictions"


def recommended(
    model: nn.Module,
    facts: Calibration | str | Path,
    *,
    head: str | None = None,
    **settings: Any,
) -> LabelAware:
    """The combination that did best in our measurements, for any calibrated classifier.

    Batch normalisation follows the stream (`Streamed`), compared with source images of the same
    labels, and calibrated logits are adjusted by the labels of the stream (`Paced`). A
    network without batch normalisation keeps its statistics, and only changes of the labels adjust
    its predictions. After a calibration on images that the model was trained on, predictions are
    left as they are. ``describe()`` says what is done.

    Args:
        model: The classifier that was calibrated; it is not changed.
        facts: What `calibrate` found, or the folder where it was saved.
        head: Path of the classifier head, if another than the calibration found.
        settings: Settings of `Streamed`.
    """
    if not isinstance(facts, Calibration):
        facts = Calibration.load(facts)
    if facts.classifier is None:
        raise SettingError(
            "facts of recommended",
            must_be="made by twoshift.calibrate, or in the folder of a source model",
            cure="Calibrate the model: twoshift.calibrate(model, batches).",
        )
    check_settings("recommended", Streamed, settings)
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
    judge, estimated = known.get("accuracy_judge"), hand_out(known, Paced)
    if not facts.held_out:
        judge, reason = None, TRAINED_ON
        method: Method = Source(attach(net, IdentityAdapter(classes, classes), ANSWER))
    else:
        adapter = logit_adapter(
            net, known["assumes"], temperature=temperature, head=head, classes=classes
        )
        adapted = attach(net, adapter, head)
        reason = f"temperature {temperature:.2f}, {FAIR if known['assumes'] is None else BIASED}"
        if known.get("moments") is not None:
            method = Streamed(adapted, **hand_out(known, Streamed, settings))
        else:
            method, reason = Source(adapted), f"{reason}; {ONLY_CHANGES}"
    live = LabelAware(method, Paced(classes, **estimated), judge)
    live.because = reason
    if classifier.inputs is not None:
        live.expect(classifier.inputs)
    return live
