"""Watch a live classifier: readings after every batch, their history, and alarms."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from twoshift.accuracy import Expected
from twoshift.calibration import Calibration
from twoshift.errors import BatchError
from twoshift.registry import check_numbers
from twoshift.watch._images import Images, Looks, Probe
from twoshift.watch._predictions import Predictions, Told
from twoshift.watch._unadapted import Live, method_of, unadapted
from twoshift.watch.alarms import ALPHA, OF_IMAGES, Alarm, AlarmLog, Test, make_tests
from twoshift.watch.distances import by_chance, label_distance
from twoshift.watch.history import History

Readings = dict[str, float | int | dict[str, float] | None]
NUMBERS = (
    "images",
    "batch",
    "expected_accuracy",
    "expected_accuracy_low",
    "expected_accuracy_high",
    "confidence",
    "label_distance",
    "label_distance_by_chance",
    "pace",
    "appearance_distance",
    "out_of_range",
    "repeated",
    "covariate_distance",
    "agreement",
    "alarms",
)
MANY_OUTSIDE, MANY_REPEATED, OFTEN_FAR = 0.25, 0.75, 0.05  # bounds of means if all is well
KEPT = 256  # alarms


class Watch:
    """Tells after every batch how a live classifier is doing, without labels.

    It is called like the classifier and returns the same logits. A reading that the method, the
    network or the calibration cannot give is None. Everything may be called from several threads.

    Args:
        live: A method, such as ``recommended(...)``, or a stream of one.
        facts: The calibration of its classifier, or the folder where it was saved.
        accuracy: An alarm is raised if accuracy is probably below this; by default half-way between
            guessing and the accuracy at calibration.
        alpha: Probability that a healthy stream ever raises an alarm.
        probe: Share of images that also pass through the unadapted model; 0 for none, which leaves
            out the readings ``agreement`` and ``covariate_distance``.
        recent: Batches that the history keeps as they are; see `History`.
        log: A folder to write alarms to, see `AlarmLog`.
        model: The classifier as it was before adaptation, for methods it cannot be taken from.

    Attributes:
        readings: The last readings, by name.
        history: All readings that are numbers, in bounded memory.
        alarms: The last alarms, the oldest first.
        images: Number of images so far.
    """

    def __init__(
        self,
        live: Live,
        facts: Calibration | str | Path,
        *,
        accuracy: float | None = None,
        alpha: float = ALPHA,
        probe: float = 0.005,
        recent: int = 256,
        log: str | Path | None = None,
        model: nn.Module | None = None,
    ) -> None:
        check_numbers("watch", "from 0 to 1", probe=probe, alpha=alpha)
        if accuracy is not None:
            check_numbers("watch", "from 0 to 1", accuracy=accuracy)
        method_of(live)  # refuses anything else
        self.facts = facts if isinstance(facts, Calibration) else Calibration.load(facts)
        self.live, self.log = live, None if log is None else AlarmLog(log, _name(live))
        self._told = Told(live, self.facts)
        self.accuracy = self._told.usual if accuracy is None else accuracy
        self.source = unadapted(live, self.facts, model)
        self._predictions, self._pixels = Predictions(self._told), Images(self.facts)
        self._probe = Probe(self.source, self.facts, self._told.classes, probe)
        self._tests = make_tests(alpha)
        self.history = History(NUMBERS, recent)
        self._lock = threading.RLock()
        self.restart()

    def restart(self) -> None:
        """Forget everything seen so far; the live classifier stays as it is."""
        with self._lock:
            self.images, self.readings = 0, Readings()
            self.alarms: list[Alarm] = []
            self._predictions.restart()
            self._pixels.restart()
            self._probe.restart()
            for test in self._tests.values():
                test.restart()
            self.history.clear()

    def __call__(self, x: Tensor) -> Tensor:
        """Predict a batch by the live classifier, and take readings."""
        with self._lock:
            try:
                logits = self.live(x)
            except BatchError:
                self.refused(x)
                raise
            self.observe(x, logits)
            return logits

    @property
    def active(self) -> list[Alarm]:
        """Alarms that have not ended."""
        with self._lock:
            return [t.alarm for t in self._tests.values() if t.on and t.alarm is not None]

    @property
    def suspicion(self) -> float:
        """From 0 to 1, how much of the evidence for any alarm there is."""
        with self._lock:
            return max(test.suspicion for test in self._tests.values())

    def observe(self, x: Tensor, logits: Tensor) -> list[Alarm]:
        """Take readings of a batch that the live classifier has predicted.

        Args:
            x: The images.
            logits: What it returned for them.

        Returns:
            Alarms that were raised, and those that have ended.
        """
        with self._lock:
            probs, view = self._told.probabilities(logits), method_of(self.live).view_in_use
            classes = self._told.unadjusted(self.live, logits)
            frequent = self._predictions.frequent()
            self._predictions.add(probs, classes, view)
            labels = self._labels()
            events = self._look(x, logits.detach().argmax(1).cpu().numpy(), labels)
            start = self.images - len(x)
            if frequent is not None:  # chosen before the batch was seen
                name = self._class_name(frequent)
                message = f"nearly all predictions are {name}, more than any labels explain"
                one = (classes == frequent).astype(np.float64)
                explained = float(self._told.explained[frequent])
                events += self._test("collapse", one, explained, start, message)
            events += self._doubt(probs, view, start)
            self._read(len(x), probs, labels)
            return events

    def observe_images(self, x: Tensor) -> list[Alarm]:
        """Take readings of a batch that the live classifier has not predicted."""
        with self._lock:
            events = self._look(x, None, self._labels())
            self._read(len(x), None, None)
            return events

    def refused(self, x: Any) -> None:
        """Count a batch that was refused, if its pixels are out of range."""
        with self._lock:
            if not _out_of_range(x, method_of(self.live)):
                return
            message = "batches are refused: pixels are far out of range or not finite"
            ones = np.ones(min(len(x), 16))
            self.images += len(x)
            self._test("inputs", ones, MANY_OUTSIDE, self.images - len(x), message)

    def _look(
        self, x: Tensor, predicted: NDArray[np.int64] | None, labels: NDArray[np.float64]
    ) -> list[Alarm]:
        start, events = self.images, list[Alarm]()
        self.images += len(x)
        self._looks = looks = self._pixels.look(x)
        if looks is not None:
            message = "the same image comes again and again"
            events += self._test("repeats", looks.repeated, MANY_REPEATED, start, message)
            if looks.outside is not None:
                message = "images look like none of those of the calibration"
                outside = looks.outside.astype(np.float64)
                events += self._test("inputs", outside, MANY_OUTSIDE, start, message)
        often = self._tests["statistics"].on
        if self._probe.look(x, predicted, labels, self.images, often) and self._probe.layers:
            distance, far = self._probe.distance, self._probe.far
            assert distance is not None
            assert far is not None
            message = "statistics of layers are far outside of all that was seen at calibration"
            hit = [float(distance > far)]
            events += self._test("statistics", hit, OFTEN_FAR, start, message)
        return events

    def _doubt(self, probs: Tensor, view: int, start: int) -> list[Alarm]:
        if self.accuracy is None:
            return []
        doubts = self._predictions.doubts(probs, view, self.accuracy)
        if doubts is None:
            return []
        message = f"accuracy is probably below {self.accuracy:.0%}"
        return self._test("accuracy", *doubts, start, message)

    def _test(self, kind: str, values: Any, bound: float, start: int, message: str) -> list[Alarm]:
        test = self._tests[kind]
        if not test.add(values, bound, start, self.images, message):
            return []
        return [self._keep(test)]

    def _keep(self, test: Test) -> Alarm:
        """Remember an alarm that was raised, or has ended."""
        assert test.alarm is not None
        if test.alarm.ended is not None:
            same = (test.kind, test.alarm.raised)
            self.alarms = [a for a in self.alarms if (a.kind, a.raised) != same]
        self.alarms = [*self.alarms, test.alarm][-KEPT:]
        if self.log is not None:
            self.log.add(test.alarm)
        return test.alarm

    def _labels(self) -> NDArray[np.float64]:
        """The label distribution of the stream, as the method or its predictions estimate it."""
        prior = getattr(self.live, "prior", None)
        if isinstance(prior, Tensor):
            return prior.detach().cpu().double().numpy()
        return self._predictions.mean

    def _read(self, batch: int, probs: Tensor | None, labels: NDArray[np.float64] | None) -> None:
        looks: Looks | None = self._looks
        outside = None if looks is None or looks.outside is None else float(looks.outside.mean())
        readings: Readings = {
            "images": self.images,
            "batch": batch,
            **self._of_predictions(probs, labels),
            "appearance_distance": None if looks is None else looks.distance,
            "out_of_range": outside,
            "repeated": None if looks is None else float(looks.repeated.mean()),
            "covariate_distance": self._probe.distance,
            "agreement": self._probe.agreement,
            "alarms": sum(test.on for test in self._tests.values()),
            "covariate_distance_by_layer": dict(self._probe.layers or {}),
        }
        self.readings = readings
        self.history.add({name: readings[name] for name in NUMBERS})  # type: ignore[misc]

    def _of_predictions(self, probs: Tensor | None, labels: Any) -> Readings:
        if probs is None:
            names = NUMBERS[2 : NUMBERS.index("pace") + 1]
            return dict.fromkeys(names)
        expected = self._expected()
        low, high = (None, None) if expected is None else (expected.low, expected.high)
        source = self._told.source_labels
        return {
            "expected_accuracy": None if expected is None else expected.value,
            "expected_accuracy_low": low,
            "expected_accuracy_high": high,
            "confidence": float(probs.amax(1).mean()),
            "label_distance": None if source is None else label_distance(labels, source),
            "label_distance_by_chance": None
            if source is None
            else self._by_chance(source, self._predictions.weight),
            "pace": self._predictions.pace,
        }

    def _by_chance(self, labels: NDArray[np.float64], images: float) -> float:
        if (known := getattr(self, "_chance", None)) is None or known[0] != int(images):
            self._chance = known = (int(images), by_chance(labels, images))
        return known[1]

    def _expected(self) -> Expected | None:
        expected = getattr(self.live, "expected_accuracy", None)
        return self._predictions.expected() if expected is None else expected

    def _class_name(self, label: int) -> str:
        names = self.facts.classifier and self.facts.classifier.classes
        return f"{names[label]!r}" if names else f"class {label}"

    def dismiss(self, kinds: Iterable[str]) -> None:
        """End the alarms of some kinds: something else explains them."""
        with self._lock:
            for kind in kinds:
                test = self._tests[kind]
                if test.on:
                    test.end(self.images)
                    self._keep(test)

    def suspend(self) -> None:
        """Forget the predictions, but not the images nor the alarms: others will be predicted."""
        with self._lock:
            self._predictions.restart()
            for kind, test in self._tests.items():
                if test.on:
                    test.retry()
                elif kind not in OF_IMAGES:
                    test.restart()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """All that `load_state` needs to go on, as files of tensors; alarms are in ``alarms``."""
        with self._lock:
            parts = {
                "predictions": self._predictions.state(),
                "pixels": self._pixels.state(),
                "probe": self._probe.state(),
                "history": self.history.state(),
                "evidence": {
                    f"{kind}.{side}.{name}": value
                    for kind, test in self._tests.items()
                    for side, evidence in test.state().items()
                    for name, value in evidence.items()
                },
            }
            return {n: {k: _tensor(v) for k, v in part.items()} for n, part in parts.items()}

    def load_state(
        self, state: Mapping[str, Mapping[str, Tensor]], images: int, alarms: list[Alarm]
    ) -> None:
        """Go on from a `state`, the number of images and the alarms that belong to it."""
        parts = {n: {k: v.numpy() for k, v in part.items()} for n, part in state.items()}
        with self._lock:
            self.restart()
            self._predictions.load(parts["predictions"])
            self._pixels.load(parts["pixels"])
            self._probe.load(parts["probe"])
            self.history.load(parts["history"])
            self.images, self.alarms = images, list(alarms)
            for kind, test in self._tests.items():
                own = {n.removeprefix(f"{kind}."): v for n, v in parts["evidence"].items()}
                sides = {
                    side: {
                        n.removeprefix(f"{side}."): v
                        for n, v in own.items()
                        if n.startswith(f"{side}.")
                    }
                    for side in ("wrong", "right")
                }
                last = [alarm for alarm in alarms if alarm.kind == kind]
                test.load(sides, last[-1] if last else None)


def _tensor(value: Any) -> Tensor:
    return torch.from_numpy(np.array(value, np.float64))


def _name(live: Live) -> str:
    return str(getattr(live, "name", ""))


def _out_of_range(x: Any, method: Any) -> bool:
    """Whether the pixels of a batch are why it was refused."""
    if not isinstance(x, Tensor) or x.dim() < 2 or not x.numel() or not x.is_floating_point():
        return False
    low, high = (float(limit) for limit in x.detach().aminmax())
    if not (np.isfinite(low) and np.isfinite(high)):
        return True
    inputs = method.inputs
    if inputs is None or inputs.low is None:
        return False
    span = inputs.high - inputs.low
    return low < inputs.low - span or high > inputs.high + span
