"""Calibrations: the facts of a source model, saved as tensors in a folder inside its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import BaseModel, Field, NonNegativeInt
from torch import Tensor

from twoshift.calibration.classifier import Classifier, weights_of
from twoshift.calibration.facts import FROM_CARD, FROM_PREDICTIONS, Predictions, Value
from twoshift.errors import MismatchError, SettingError
from twoshift.models.head import find_head
from twoshift.models.identity import sketch
from twoshift.storage import (
    card_of,
    fingerprint,
    is_saved,
    join_tensors,
    misfits,
    read_card,
    read_folder,
    save_folder,
    split_tensors,
)
from twoshift.train.checkpoint import SourceModel, load_source

KIND = "calibration"
FOLDER = "calibration"  # inside the folder of the source model
TENSORS = "calibration"
AGAIN = "Remove that folder and calibrate again."
MODES = ("running", "batch")
GROUPS = (*MODES, "facts")
# what 0.1.0 called some facts
_RENAMED = {
    "soft": "confusion",
    "hard": "hard_confusion",
    "readout": "regression",
    "cotta_threshold": "confidence_threshold",
}


# facts that are no tensors: lists are of 0.1.0, and tensors by name may be none
Plain = bool | int | float | list[float] | Annotated[dict[str, Any], Field(max_length=0)] | None


@card_of(KIND)
class CalibrationCard(BaseModel):
    """Fields of the card of a calibration; see `Calibration`."""

    held_out: bool
    folds: NonNegativeInt
    source: str
    running: dict[str, Plain]
    batch: dict[str, Plain]
    facts: dict[str, Plain] = {}
    classifier: dict[str, Any] | None = None


@dataclass(frozen=True)
class Calibration:
    """All facts that were computed for a classifier; `twoshift.calibration.facts` defines them.

    Attributes:
        running: Facts of predictions that are normalised by running statistics, by name.
        batch: Facts of predictions that are normalised by the statistics of their batch.
        held_out: Whether the models that predicted had not been trained on the images.
        folds: Number of models that were trained for it; 0 if the model itself predicted.
        source: SHA-256 of the weights of the model.
        facts: Facts that do not depend on the statistics; None for one that the network lacks.
        classifier: How to run the model and how to know it again; only `calibrate` finds out.
    """

    running: Mapping[str, Value]
    batch: Mapping[str, Value]
    held_out: bool
    folds: int
    source: str
    facts: Mapping[str, Value] = field(default_factory=dict)
    classifier: Classifier | None = None

    def of(self, statistics: str) -> dict[str, Any]:
        """All facts under one kind of statistics, as ``Method.statistics`` names it."""
        if statistics not in MODES:
            raise SettingError("statistics", must_be=" or ".join(MODES), got=repr(statistics))
        facts = {**self.facts, **(self.running if statistics == "running" else self.batch)}
        # label distributions and counts are settings, too, which are lists
        lists = {n: t.tolist() for n, t in facts.items() if n in FROM_CARD and torch.is_tensor(t)}
        return {**facts, **lists}

    def save(self, folder: str | Path) -> None:
        """Write it to ``folder``, in one step; the folder may exist."""
        tensors: dict[str, Tensor] = {}
        content: dict[str, Any] = {
            "source": self.source,
            "held_out": self.held_out,
            "folds": self.folds,
            "classifier": None if self.classifier is None else self.classifier.card(),
        }
        for group in GROUPS:
            content[group], parts = split_tensors(group, getattr(self, group), ".")
            tensors |= parts
        save_folder(folder, KIND, content, {TENSORS: tensors})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a calibration back: from its own folder, or from that of a source model."""
        if is_saved(Path(folder) / FOLDER):
            return cls._of_source(load_source(folder))
        saved = read_folder(folder, KIND)
        with misfits(saved.folder, cure=AGAIN):
            fields = {name: saved.card[name] for name in ("held_out", "folds", "source")}
            known = saved.card.get("classifier")
            classifier = None if known is None else Classifier.of_card(known)
            groups = _groups(saved.card, saved.file(TENSORS))
            return cls(**fields, **groups, classifier=classifier)

    @classmethod
    def _of_source(cls, source: SourceModel) -> Self:
        """The calibration of a source model, with what its card and its weights say."""
        calibration = calibration_of(source)
        assert calibration is not None
        assert source.folder is not None
        weights = weights_of(source.model)
        known = {name: read(source.card) for name, read in FROM_CARD.items()}
        return cls(
            running=calibration.running,
            batch=calibration.batch,
            held_out=calibration.held_out,
            folds=calibration.folds,
            source=calibration.source,
            facts={**known, **calibration.facts},
            classifier=Classifier(
                weights=fingerprint(weights),
                sketch=sketch(weights),
                head=find_head(source.model)[0],
                classes=tuple(source.card.classes),
                images=int(calibration.running["samples"]),  # type: ignore[arg-type]
            ),
        )


def calibration_from(
    logits: Tensor, labels: Tensor, windows: tuple[Tensor, Tensor] | None = None
) -> dict[str, Any]:
    """The facts of held-out predictions of your own, by name.

    Args:
        logits: Raw outputs of the model, (N, classes), for images it was not trained on.
        labels: Their true classes, (N,); every class must occur.
        windows: See `Predictions`.
    """
    predictions = Predictions(logits, labels, windows)
    return {name: compute(predictions) for name, compute in FROM_PREDICTIONS.items()}


def known_facts(source: SourceModel, statistics: str) -> dict[str, Any]:
    """All facts of a source model, from its card and its calibration if it has one.

    Args:
        source: The source model.
        statistics: Which statistics normalise the predictions: ``"running"`` or ``"batch"``.
    """
    calibration = calibration_of(source)
    facts = {} if calibration is None else calibration.of(statistics)
    return {**{name: read(source.card) for name, read in FROM_CARD.items()}, **facts}


def calibration_of(source: SourceModel) -> Calibration | None:
    """The calibration of a source model, or None if it was never calibrated."""
    return None if source.folder is None else load_calibration(source.folder, source.weights)


def calibration_folds(source: SourceModel) -> int | None:
    """The folds of its calibration, without its facts; None if it was never calibrated."""
    if source.folder is None or not is_saved(source.folder / FOLDER):
        return None
    return int(read_card(source.folder / FOLDER, KIND)["folds"])


def save_calibration(folder: str | Path, calibration: Calibration) -> None:
    """Write a calibration into the folder of its source model, in one step."""
    calibration.save(Path(folder) / FOLDER)


def load_calibration(folder: str | Path, weights: str) -> Calibration | None:
    """Read the calibration in the folder of a source model, or None if there is none.

    Args:
        folder: Folder of the source model.
        weights: SHA-256 of its weights; the calibration of other weights is refused.
    """
    path = Path(folder).absolute() / FOLDER
    if not is_saved(path):
        return None
    calibration = Calibration.load(path)
    if calibration.source != weights:
        raise MismatchError(
            f"the calibration in {path}",
            must_be=f"for the weights {weights[:12]}",
            got=f"one for {calibration.source[:12]}",
            cure=AGAIN,
        )
    return calibration


def _groups(card: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The facts of every group; those that 0.1.0 wrote get their names of today."""
    renamed = {} if "facts" in card else _RENAMED
    card = {"facts": {}, **card}
    # 0.1.0 named no group for facts without statistics
    paths = {k if k.partition(".")[0] in GROUPS else f"facts.{k}": t for k, t in tensors.items()}
    groups = {}
    for group in GROUPS:
        facts = join_tensors(group, card[group], paths, ".")
        lists = {name: value for name, value in facts.items() if isinstance(value, list)}
        # 0.1.0 wrote the bias as a list
        facts |= {name: torch.tensor(v, dtype=torch.float64) for name, v in lists.items()}
        groups[group] = {renamed.get(name, name): value for name, value in facts.items()}
    return groups
