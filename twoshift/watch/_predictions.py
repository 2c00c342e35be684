"""What the predictions of a stream tell: expected accuracy, confidence, labels, collapse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twoshift.accuracy import Expected, ExpectedAccuracy
from twoshift.accuracy.signals import NAMES
from twoshift.adapters import CalibratedAdapter, adapted_heads
from twoshift.calibration import Calibration
from twoshift.errors import BatchError, SettingError
from twoshift.methods import LabelAware, LiveStream
from twoshift.watch._unadapted import Live, method_of

Array = NDArray[np.float64]
QUICK, SLOW = 64.0, 256.0  # images: half-lives of mean predictions
SHARE = 0.8  # of a class among predictions: smaller ones are no collapse
NEEDED = ("temperature", "bias", "hard_confusion")  # of the facts
FLOOR = 1e-6  # smallest share of a class, as adapters have it


class Told:
    """What was known about predictions at calibration, and how to read those of a method.

    Args:
        live: The live classifier.
        facts: Its calibration.
    """

    def __init__(self, live: Live, facts: Calibration) -> None:
        method = method_of(live)
        known = facts.of("running")  # as the expected accuracy was fitted, under all statistics
        if missing := [name for name in NEEDED if known.get(name) is None]:
            raise SettingError(
                "facts of watch",
                must_be="made by twoshift.calibrate, or in the folder of a source model",
                got=f"no {missing[0]}",
                cure="Calibrate the model: twoshift.calibrate(model, batches).",
            )
        self.classes = len(known["bias"])
        heads = [head.adapter for _, head in adapted_heads(method.model)]
        calibrated = any(isinstance(adapter, CalibratedAdapter) for adapter in heads)
        self._temperature = 1.0 if calibrated else float(known["temperature"])
        self._adjusts = isinstance(method, LabelAware) and heads[0].shifts_only_logits
        self.source_labels = _labels(known.get("source_prior"), self.classes)
        accuracy = known.get("accuracy")
        guess = 1 / self.classes
        self.usual = None if accuracy is None else (guess + float(accuracy)) / 2
        judge = known.get("accuracy_judge")
        self.judge = None if judge is None else np.asarray(judge, np.float64)
        # a method that tells its accuracy itself need not be told
        self.tells = isinstance(method, LabelAware) and method.accuracy is not None
        joint = np.asarray(known["hard_confusion"], np.float64)
        recall = joint / np.maximum(joint.sum(0), np.finfo(np.float64).tiny)
        # a class cannot be predicted more often than for images of the class it fits best
        self.explained: Array = (1 + np.maximum(recall.max(1), SHARE)) / 2

    def probabilities(self, logits: Array) -> Array:
        """Calibrated probabilities, which predict the same class; numpy is quicker than torch."""
        scaled = logits / self._temperature
        scaled -= scaled.max(1, keepdims=True)
        np.exp(scaled, out=scaled)
        scaled /= scaled.sum(1, keepdims=True)
        return scaled

    def unadjusted(self, live: Live, logits: Array) -> NDArray[np.int64]:
        """The predicted classes, without the label distribution that logits were adjusted by."""
        if self._adjusts:
            present = _present(live).cpu().numpy()
            logits = logits - np.log(np.maximum(present, FLOOR))
        return logits.argmax(1)


def _shares(sums: Array) -> Array:
    """Sums as shares; equal ones before there is any."""
    total = float(sums.sum())
    return sums / total if total > 0 else np.full(len(sums), 1 / len(sums))


def _entropy(p: Array) -> Array:
    return -(p * np.log(np.maximum(p, np.finfo(np.float64).tiny))).sum(-1)


def _labels(prior: Any, classes: int) -> Array | None:
    return None if prior is None else np.asarray(prior, np.float64).reshape(classes)


def _present(live: Live) -> Tensor:
    if isinstance(live, LiveStream):
        with live._active() as method:
            assert isinstance(method, LabelAware)
            return method.estimator.present
    assert isinstance(live, LabelAware)
    with live._using():
        return live.estimator.present


class Predictions:
    """Sums over the predictions of a stream, with half-lives counted in images.

    Args:
        told: What was known at calibration.
    """

    def __init__(self, told: Told) -> None:
        self._told = told
        self.restart()

    def restart(self) -> None:
        """Forget all predictions."""
        classes, judge = self._told.classes, self._told.judge
        self.quick, self.slow, self.votes = (np.zeros(classes) for _ in range(3))
        self.images = 0
        tells = judge is None or self._told.tells
        self.accuracy = None if tells else ExpectedAccuracy(classes, torch.from_numpy(judge))

    def add(self, probs: Array, classes: NDArray[np.int64], view: int) -> None:
        """Take in a batch: probabilities (B, C), and unadjusted predicted classes (B,)."""
        sums, votes = probs.sum(0), np.bincount(classes, minlength=self._told.classes)
        images = len(probs)
        self.quick = 0.5 ** (images / QUICK) * self.quick + sums
        self.slow = 0.5 ** (images / SLOW) * self.slow + sums
        self.votes = 0.5 ** (images / SLOW) * self.votes + votes
        self.images += images
        if self.accuracy is not None:
            self.accuracy.update(torch.from_numpy(probs), view)

    def expected(self) -> Expected | None:
        """How often predictions are expected to be right; None where the method tells it itself."""
        return None if self.accuracy is None else self.accuracy.read()

    @property
    def mean(self) -> Array:
        """The mean prediction of the last hundreds of images."""
        return _shares(self.slow)

    @property
    def pace(self) -> float:
        """How far the mean prediction of the last images is from that of the last hundreds."""
        return float(np.abs(_shares(self.quick) - _shares(self.slow)).sum() / 2)

    @property
    def weight(self) -> float:
        """Number of equally counted images that the mean prediction is worth."""
        keep = 0.5 ** (1 / SLOW)
        return min(float(self.images), (1 + keep) / (1 - keep))

    def frequent(self) -> int | None:
        """The class that was predicted most often; None before the first image."""
        return int(self.votes.argmax()) if self.images else None

    def doubts(self, probs: Array, view: int, bound: float) -> tuple[Array, float] | None:
        """Observations for an alarm: how wrong each image is expected to be, and their bound.

        The expected accuracy is a weighted sum of signals, all of which but one are means over
        images. So each image has a value, whose mean is the expected accuracy; the one that is left
        is taken from the stream. None if that cannot be told, or if no value can be so low.

        Args:
            probs: Calibrated probabilities of a batch that was taken in.
            view: Which statistics predicted it.
            bound: The accuracy.
        """
        if self._told.judge is None or not self.images:
            return None
        row = self._told.judge[view]
        weights, threshold = row[: len(NAMES)], row[-1]
        classes = probs.shape[1]
        largest, spread = probs.max(1), _entropy(probs) / math.log(classes)
        diversity = float(_entropy(self.mean)) / math.log(classes)
        values = weights[0] * largest + weights[1] * spread + weights[2] * (largest > threshold)
        values += weights[3] * diversity + row[len(NAMES)]
        # each signal is from 0 to 1, confidence at least 1 / C
        ends = [
            (w * low, w) for w, low in zip(weights.tolist(), (1 / classes, 0, 0, 0), strict=True)
        ]
        least, most = (float(row[len(NAMES)]) + sum(map(f, ends)) for f in (min, max))
        limit = 1 - (bound - least) / (most - least)
        if not 0 < limit < 1:
            return None
        return np.clip(1 - (values - least) / (most - least), 0, 1), limit

    def state(self) -> dict[str, Array]:
        """All that `load` needs to go on."""
        own = {"quick": self.quick, "slow": self.slow, "votes": self.votes}
        own = {**own, "images": np.array(float(self.images))}
        if self.accuracy is None:
            return own
        return own | {f"accuracy.{n}": t.double().numpy() for n, t in self.accuracy.state().items()}

    def load(self, state: Mapping[str, Array]) -> None:
        """Go on from a `state`."""
        shapes = {name: np.shape(state[name]) for name in ("quick", "slow", "votes")}
        if set(shapes.values()) != {(self._told.classes,)}:
            must_be = f"of {self._told.classes} classes"
            raise BatchError("state of the predictions", must_be=must_be, got=shapes)
        if self.accuracy is not None:
            own = {n: torch.from_numpy(np.array(state[f"accuracy.{n}"])) for n in ("sums", "view")}
            self.accuracy.check_state(own)
            self.accuracy.hold(own)
        self.quick, self.slow, self.votes = (np.array(state[name]) for name in shapes)
        self.images = int(state["images"])
