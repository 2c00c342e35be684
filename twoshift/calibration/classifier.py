"""What a calibration says of the classifier itself: how to run it, and how to know it again."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from twoshift.calibration.evidence import Reading
from twoshift.errors import MismatchError, TwoshiftWarning
from twoshift.methods import Inputs
from twoshift.methods._appearance import Appearance, checked_appearance
from twoshift.models.identity import same_sketch, sketch
from twoshift.storage import fingerprint


@dataclass(frozen=True)
class Classifier:
    """A classifier as it was when it was calibrated.

    Attributes:
        weights: Fingerprint of its weights.
        sketch: What remains of them when they are rounded to another floating-point type.
        head: Path of its head, or ``"answer"`` if no layer's output is the answer.
        prepared: What `twoshift.models.classifier.prepare` must be told besides the model.
        inputs: Size and range of its images.
        classes: Names of its classes, if they are known.
        images: Number of images that the predictions were judged on.
        appearance: What its images look like: smallest, largest, mean and variance of brightness,
            contrast and detail; None if that is not known.
        reading: Which label distribution its logits contain, with the evidence; None where there
            was no question.
    """

    weights: str
    sketch: str
    head: str
    prepared: Mapping[str, Any] = field(default_factory=dict)
    inputs: Inputs | None = None
    classes: tuple[str, ...] | None = None
    images: int = 0
    reading: Reading | None = None
    appearance: Appearance | None = None

    def check(self, model: nn.Module) -> None:
        """Refuse another prepared model; the same one in another floating-point type is taken."""
        tensors = weights_of(model)
        if fingerprint(tensors) == self.weights:
            return
        if not same_sketch(self.sketch, sketch(tensors)):
            raise MismatchError(
                f"the facts belong to another model than this {type(model).__name__}",
                cure="Calibrate this one: twoshift.calibrate(model, batches).",
            )
        message = "the facts were found in another floating-point type: they hold up to rounding"
        warnings.warn(message, TwoshiftWarning, stacklevel=3)

    def card(self) -> dict[str, Any]:
        """As a card holds it."""
        inputs = None if self.inputs is None else self.inputs.card()
        return {**asdict(self), "prepared": dict(self.prepared), "inputs": inputs}

    @classmethod
    def of_card(cls, card: Mapping[str, Any]) -> Classifier:
        """What `card` made, read back."""
        parts = dict(card)
        inputs, classes, reading, appearance = (
            parts.pop(name, None) for name in ("inputs", "classes", "reading", "appearance")
        )
        return cls(
            **parts,
            inputs=None if inputs is None else Inputs.of_card(inputs),
            classes=None if classes is None else tuple(classes),
            reading=None if reading is None else Reading(**reading),
            appearance=None if appearance is None else checked_appearance(appearance),
        )


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """All that decides the predictions of a prepared model."""
    return dict(model.state_dict())
