"""Calibrations: the facts of a source model, saved as tensors in a folder inside its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, NonNegativeInt
from torch import Tensor

from twoshift.calibration.facts import FROM_CARD, FROM_PREDICTIONS, Predictions, Value
from twoshift.errors import MismatchError, SettingError
from twoshift.storage import (
    card_of,
    is_saved,
    join_tensors,
    misfits,
    read_card,
    read_folder,
    save_folder,
    split_tensors,
)
from twoshift.train.checkpoint import SourceModel

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


@dataclass(frozen=True)
class Calibration:
    """All facts that were computed for a source model; `twoshift.calibration.facts` defines them.

    Attributes:
        running: Facts of predictions that are normalised by running statistics, by name.
        batch: Facts of predictions that are normalised by the statistics of their batch.
        held_out: Whether the models that predicted had not been trained on the images.
        folds: Number of models that were trained for it; 0 if the source model itself predicted.
        source: SHA-256 of the weights of the source model.
        facts: Facts that do not depend on the statistics; None for one that the network lacks.
    """

    running: Mapping[str, Value]
    batch: Mapping[str, Value]
    held_out: bool
    folds: int
    source: str
    facts: Mapping[str, Value] = field(default_factory=dict)

    def of(self, statistics: str) -> dict[str, Any]:
        """All facts under one kind of statistics, as ``Method.statistics`` names it."""
        if statistics not in MODES:
            raise SettingError("statistics", must_be=" or ".join(MODES), got=repr(statistics))
        return {**self.facts, **(self.running if statistics == "running" else self.batch)}


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
    tensors: dict[str, Tensor] = {}
    card: dict[str, Any] = {"held_out": calibration.held_out, "folds": calibration.folds}
    for group in GROUPS:
        card[group], parts = split_tensors(group, getattr(calibration, group), ".")
        tensors |= parts
    content = {"source": calibration.source, **card}
    save_folder(Path(folder) / FOLDER, KIND, content, {TENSORS: tensors})


def load_calibration(folder: str | Path, weights: str) -> Calibration | None:
    """Read the calibration in the folder of a source model, or None if there is none.

    Args:
        folder: Folder of the source model.
        weights: SHA-256 of its weights; the calibration of other weights is refused.
    """
    path = Path(folder).absolute() / FOLDER
    if not is_saved(path):
        return None
    saved = read_folder(path, KIND)
    if saved.card["source"] != weights:
        raise MismatchError(
            f"the calibration in {path}",
            must_be=f"for the weights {weights[:12]}",
            got=f"one for {saved.card['source'][:12]}",
            cure=AGAIN,
        )
    with misfits(path, cure=AGAIN):
        fields = {name: saved.card[name] for name in ("held_out", "folds", "source")}
        return Calibration(**fields, **_groups(saved.card, saved.file(TENSORS)))


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
