"""What is known about a source model's mistakes: fitted on held-out images, kept beside it.

Calibration maps and confusion matrices are what estimators of the label distribution start from;
the confidence threshold is CoTTA's, the Fisher information EATA's, the moments of each class those
of matched statistics. Mistakes depend on the statistics that normalise a prediction, so there is
one set for either mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from twoshift.errors import BatchError, CheckpointError, MismatchError, SettingError
from twoshift.estimators.bcts import class_shares, fit_bcts
from twoshift.estimators.readout import fit_readout
from twoshift.storage import atomic_folder, read_card, read_tensors, write_card, write_tensors
from twoshift.train.windows import WINDOWS, draw_windows, label_shares

KIND = "calibration"
FOLDER = "calibration"  # within the folder of the source model
TENSORS = "calibration.safetensors"
QUANTILE, MARGIN = 0.05, 0.05  # the rule of CoTTA's authors
_FISHER, _MOMENTS = "fisher.", "moments."

Mode = Literal["running", "batch"]
MODES: tuple[Mode, ...] = ("running", "batch")


@dataclass(frozen=True)
class ModeCalibration:
    """What held-out predictions say about a model in one statistics mode.

    Attributes:
        temperature: Of the calibrated probabilities softmax(logits / temperature + bias).
        bias: One per class, mean 0; they make the probabilities those of equally frequent classes.
        soft: Joint confusion matrix, (predicted, true), sum 1, of the raw probabilities.
        hard: The same of the most likely classes.
        low_confidence: What 95 % of the largest raw probabilities exceed.
        samples: Held-out images.
        readout: Weights of the regression from mean predictions to label distributions; None in
            calibrations that are older than it.
    """

    temperature: float
    bias: list[float]
    soft: Tensor
    hard: Tensor
    low_confidence: float
    samples: int
    readout: Tensor | None = None

    @property
    def source_prior(self) -> list[float]:
        """Label distribution of the held-out images."""
        return self.hard.sum(0).tolist()

    @property
    def accuracy(self) -> float:
        """Share of right predictions, frequent classes counting more."""
        return float(self.hard.trace())

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall of the classes."""
        return float((self.hard.diagonal() / self.hard.sum(0)).mean())

    @property
    def cotta_threshold(self) -> float:
        """Confidence below which CoTTA averages over augmentations."""
        return max(self.low_confidence - MARGIN, 0.0)

    def settings(self, estimator: str) -> dict[str, Any]:
        """What an estimator of the label distribution needs of it: ``create(name, C, **this)``."""
        if estimator == "em":
            return {"temperature": self.temperature, "bias": self.bias}
        if estimator == "tilt":
            return {**self.settings("em"), "source_prior": self.source_prior}
        if estimator == "bbse":
            return {"confusion": self.soft.tolist()}
        if estimator == "rlls":
            return {"confusion": self.soft.tolist(), "samples": self.samples}
        if estimator == "readout":
            if self.readout is None:
                raise SettingError(
                    "estimator 'readout': the calibration is older than it, the source model",
                    must_be="calibrated again",
                    cure=f"Remove the folder {FOLDER!r} of the source model, twoshift calibrate.",
                )
            return {"weights": self.readout.tolist()}
        return {}


@dataclass(frozen=True)
class Calibration:
    """All that was fitted for a source model.

    Attributes:
        running: For predictions normalised by running statistics.
        batch: For predictions normalised by the statistics of their batch.
        held_out: The predictions were made by models that had not seen the images.
        folds: Models that were trained for it; 0 if it was the source model itself.
        source: SHA-256 of the weights of the source model.
        fisher: EATA's Fisher information of every trained parameter, where it was computed.
        moments: Mean and variance of each channel, class by class, of every batch normalisation,
            where they were computed.
    """

    running: ModeCalibration
    batch: ModeCalibration
    held_out: bool
    folds: int
    source: str
    fisher: dict[str, list[float]] | None = None
    moments: dict[str, Any] | None = None

    def of(self, mode: str) -> ModeCalibration:
        """That of a statistics mode, as ``Method.statistics`` names it."""
        if mode not in MODES:
            raise SettingError("statistics mode", must_be=" or ".join(MODES), got=mode)
        return self.running if mode == "running" else self.batch


def calibration_from(
    logits: Tensor, labels: Tensor, windows: tuple[Tensor, Tensor] | None = None
) -> ModeCalibration:
    """Fit everything to held-out predictions of your own.

    Args:
        logits: Raw outputs of the model, (N, classes), on images it was not trained on.
        labels: Their true classes, (N,); every class must occur.
        windows: Mean probabilities and label shares of label-shifted windows, both
            (windows, classes), where they depend on who else is in a batch; otherwise
            windows are drawn from ``logits``.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or not len(labels):
        raise BatchError(
            "logits and labels to calibrate on",
            must_be="(N, classes) and (N,)",
            got=f"{tuple(logits.shape)} and {tuple(labels.shape)}",
        )
    if not logits.isfinite().all():
        raise BatchError("logits to calibrate on", must_be="finite", got="NaN or infinity")
    logits, labels = logits.detach().cpu().double(), labels.detach().cpu()
    classes = logits.shape[1]
    class_shares(labels.numpy(), classes)  # refuses classes that are absent
    temperature, bias = fit_bcts(logits, labels)
    probs = logits.softmax(1)
    truth = torch.eye(classes, dtype=torch.float64)[labels] / len(labels)
    confidence, predicted = probs.max(1)
    means, shares = _windows(probs, labels) if windows is None else windows
    return ModeCalibration(
        temperature=temperature,
        bias=bias,
        soft=(probs.T @ truth).float(),
        hard=(torch.eye(classes, dtype=torch.float64)[predicted].T @ truth).float(),
        low_confidence=float(np.quantile(confidence.numpy(), QUANTILE)),
        samples=len(labels),
        readout=fit_readout(means.double().numpy(), shares.double().numpy()),
    )


def _windows(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    y, classes = labels.numpy(), probs.shape[1]
    drawn = draw_windows(y, classes, WINDOWS, np.random.default_rng(0))
    shares = torch.from_numpy(np.stack([label_shares(y[rows], classes) for rows in drawn]))
    return torch.stack([probs[torch.from_numpy(rows)].mean(0) for rows in drawn]), shares


def save_calibration(folder: Path, calibration: Calibration) -> None:
    """Write it beside the source model in ``folder``, atomically."""
    tensors: dict[str, Tensor] = {}
    card: dict[str, Any] = {}
    for mode in MODES:
        part = calibration.of(mode)
        tensors |= {f"{mode}.soft": part.soft, f"{mode}.hard": part.hard}
        if part.readout is not None:
            tensors[f"{mode}.readout"] = part.readout
        card[mode] = {
            "temperature": part.temperature,
            "bias": part.bias,
            "low_confidence": part.low_confidence,
            "cotta_threshold": part.cotta_threshold,
            "accuracy": part.accuracy,
            "balanced_accuracy": part.balanced_accuracy,
            "samples": part.samples,
        }
    for start, group in ((_FISHER, calibration.fisher), (_MOMENTS, calibration.moments)):
        tensors |= {f"{start}{name}": torch.tensor(v) for name, v in (group or {}).items()}
    with atomic_folder(folder / FOLDER, keep_others=False) as temporary:
        write_tensors(temporary / TENSORS, tensors)
        write_card(
            temporary,
            {
                "kind": KIND,
                "held_out": calibration.held_out,
                "folds": calibration.folds,
                "source": calibration.source,
                "source_prior": calibration.running.source_prior,
                **card,
            },
        )


def load_calibration(folder: Path, source: str) -> Calibration | None:
    """Read that of the source model in ``folder``, or None where it was never calibrated.

    Args:
        folder: Of the source model.
        source: SHA-256 of its weights; the calibration of others is refused.
    """
    path = folder / FOLDER
    if not path.exists() and not path.with_name(f".{FOLDER}.old").exists():
        return None
    card = read_card(path, KIND)
    tensors = read_tensors(card["folder"] / TENSORS)
    if card.get("source") != source:
        raise MismatchError(
            f"the calibration in {path}",
            must_be=f"of the weights {source[:12]}",
            got=str(card.get("source"))[:12],
            cure="Remove that folder, and calibrate again.",
        )
    try:
        running, batch = (_mode(mode, card[mode], tensors) for mode in MODES)
        fisher, moments = (_group(start, tensors) for start in (_FISHER, _MOMENTS))
        return Calibration(
            running, batch, card["held_out"], card["folds"], card["source"], fisher, moments
        )
    except (KeyError, TypeError) as e:
        raise CheckpointError(f"{path} does not fit its own card: {e}") from e


def _group(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Those whose names begin so, as lists; None if there are none."""
    found = {k.removeprefix(start): v.tolist() for k, v in tensors.items() if k.startswith(start)}
    return found or None


def _mode(mode: str, card: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ModeCalibration:
    return ModeCalibration(
        temperature=card["temperature"],
        bias=card["bias"],
        soft=tensors[f"{mode}.soft"],
        hard=tensors[f"{mode}.hard"],
        low_confidence=card["low_confidence"],
        samples=card["samples"],
        readout=tensors.get(f"{mode}.readout"),
    )
