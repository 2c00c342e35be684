"""What is known of a source model, kept as tensors in a folder beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twoshift.calibration.facts import FROM_CARD, FROM_PREDICTIONS, Predictions, Value
from twoshift.errors import CheckpointError, MismatchError, SettingError
from twoshift.storage import (
    CARD,
    atomic_folder,
    read_card,
    read_tensors,
    write_card,
    write_tensors,
)
from twoshift.train.checkpoint import SourceModel

KIND = "calibration"
FOLDER = "calibration"  # within the folder of the source model
TENSORS = "calibration.safetensors"
MODES = ("running", "batch")
# what 0.1.0 called some facts
_RENAMED = {
    "soft": "confusion",
    "hard": "hard_confusion",
    "readout": "regression",
    "cotta_threshold": "confidence_threshold",
}


@dataclass(frozen=True)
class Calibration:
    """All facts that were computed for a source model; `twoshift.calibration.facts` has them.

    Attributes:
        running: Facts of predictions normalised by running statistics.
        batch: Facts of predictions normalised by the statistics of their batch.
        held_out: The predictions were made by models that had not seen the images.
        folds: Models that were trained for it; 0 if the source model itself predicted.
        source: SHA-256 of the weights of the source model.
        facts: Facts that do not depend on the statistics, by name; one that the network cannot
            have is an empty dictionary.
    """

    running: Mapping[str, Value]
    batch: Mapping[str, Value]
    held_out: bool
    folds: int
    source: str
    facts: Mapping[str, Value] = field(default_factory=dict)

    def of(self, statistics: str) -> dict[str, Value]:
        """All facts under one kind of statistics, as ``Method.statistics`` names it."""
        if statistics not in MODES:
            raise SettingError("statistics", must_be=" or ".join(MODES), got=statistics)
        return {**self.facts, **(self.running if statistics == "running" else self.batch)}


def calibration_from(
    logits: Tensor, labels: Tensor, windows: tuple[Tensor, Tensor] | None = None
) -> dict[str, Value]:
    """The facts of held-out predictions of your own; see `Predictions` for the arguments."""
    predictions = Predictions(logits, labels, windows)
    return {name: compute(predictions) for name, compute in FROM_PREDICTIONS.items()}


def known_facts(source: SourceModel, statistics: str) -> dict[str, Any]:
    """Every fact of a source model under one kind of statistics: of its card and calibration."""
    calibration = calibration_of(source)
    facts = {} if calibration is None else calibration.of(statistics)
    return {**{name: read(source.card) for name, read in FROM_CARD.items()}, **facts}


def calibration_of(source: SourceModel) -> Calibration | None:
    """The calibration beside a source model, or None where it was never calibrated."""
    if source.folder is None:
        return None
    return load_calibration(source.folder, source.weights)


def save_calibration(folder: Path, calibration: Calibration) -> None:
    """Write it beside the source model in ``folder``, atomically."""
    tensors: dict[str, Tensor] = {}
    card: dict[str, Any] = {"absent": []}
    for mode in MODES:
        card[mode] = {}
        for name, value in getattr(calibration, mode).items():
            if isinstance(value, Tensor):
                tensors[f"{mode}.{name}"] = value
            else:
                card[mode][name] = value
    for name, values in calibration.facts.items():
        assert isinstance(values, dict)
        tensors |= {f"{name}.{part}": tensor for part, tensor in values.items()}
        card["absent"] += [] if values else [name]
    about = {"held_out": calibration.held_out, "folds": calibration.folds}
    with atomic_folder(folder / FOLDER, keep_others=False) as temporary:
        write_tensors(temporary / TENSORS, tensors)
        write_card(temporary, {"kind": KIND, "source": calibration.source, **about, **card})


def load_calibration(folder: str | Path, source: str) -> Calibration | None:
    """Read that of the source model in ``folder``, or None where it was never calibrated.

    Args:
        folder: Folder of the source model.
        source: SHA-256 of its weights; the calibration of others is refused.
    """
    path = Path(folder) / FOLDER
    if not path.exists() and not path.with_name(f".{FOLDER}.old").exists():
        return None
    card = path / CARD
    changed = card.stat().st_mtime_ns if card.exists() else 0
    return _load(path, source, changed)


@lru_cache(maxsize=4)  # every cell of a table asks again, and large networks have large tables
def _load(path: Path, source: str, _changed: int) -> Calibration:
    card = read_card(path, KIND)
    tensors = read_tensors(card["folder"] / TENSORS)
    if card.get("source") != source:
        raise MismatchError(
            f"the calibration in {path}",
            must_be=f"of the weights {source[:12]}",
            got=str(card.get("source"))[:12],
            cure="Remove that folder, and calibrate again.",
        )
    modes: dict[str, dict[str, Value]] = {mode: {} for mode in MODES}
    facts: dict[str, Value] = {name: {} for name in card.get("absent", ())}
    try:
        for mode in MODES:
            for name, value in card[mode].items():
                numbers = torch.tensor(value, dtype=torch.float64) if name == "bias" else value
                modes[mode][_RENAMED.get(name, name)] = numbers
        for key, tensor in tensors.items():
            name, _, part = key.partition(".")
            if name in MODES:
                modes[name][_RENAMED.get(part, part)] = tensor
            else:
                group = facts.setdefault(name, {})
                assert isinstance(group, dict)
                group[part] = tensor
        return Calibration(
            modes["running"], modes["batch"], card["held_out"], card["folds"], source, facts
        )
    except (KeyError, TypeError) as e:
        raise CheckpointError(f"{path} does not fit its own card: {e}") from e
