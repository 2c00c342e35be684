"""Watch a live classifier: readings all along the stream, their history, and alarms."""

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
from twoshift.watch._block import LOOKED_AT, Block, Gathered
from twoshift.watch._images import Images, Looks, Probe, out_of_range
from twoshift.watch._predictions import Predictions, Told
from twoshift.watch._unadapted import Live, method_of, unadapted
from twoshift.watch.alarms import (
    ALPHA,
    OF_IMAGES,
    Alarm,
    AlarmLog,
    Test,
    load_tests,
    make_tests,
    tests_state,
)
from twoshift.watch.distances import by_chance, label_distance
from twoshift.watch.history import History

Numbers = NDArray[np.float64]
Readings = dict[str, float | int | dict[str, float] | None]
NUMBERS = (
    "images",
    "block",
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
    """Tells how a live classifier is doing, all along a stream and without labels.

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
        block: Images that readings are taken of at once; those of small batches wait for it, or
            until somebody asks.
        recent: Readings that the history keeps as they are; see `History`.
        log: A folder to write alarms to, see `AlarmLog`.
        model: The classifier as it was before adaptation, for methods it cannot be taken from.
    """

    def __init__(
        self,
        live: Live,
        facts: Calibration | str | Path,
        *,
        accuracy: float | None = None,
        alpha: float = ALPHA,
        probe: float = 0.005,
        block: int = 128,
        recent: int = 256,
        log: str | Path | None = None,
        model: nn.Module | None = None,
    ) -> None:
        check_numbers("watch", "from 0 to 1", probe=probe, alpha=alpha)
        check_numbers("watch", "a whole number from 1", block=block)
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
        self._history, self._block = History(NUMBERS, recent), Block(block)
        self._lock = threading.RLock()
        self.restart()

    def restart(self) -> None:
        """Forget everything seen so far; the live classifier stays as it is."""
        with self._lock:
            self._images, self._readings, self._alarms = 0, Readings(), list[Alarm]()
            self._block.clear()
            self._predictions.restart()
            self._pixels.restart()
            self._probe.restart()
            for test in self._tests.values():
                test.restart()
            self._history.clear()

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
    def images(self) -> int:
        """Number of images so far."""
        return self._images + len(self._block)

    @property
    def readings(self) -> Readings:
        """The last readings, by name; those of images that still wait are taken first."""
        with self._lock:
            self._take()
            return self._readings

    @property
    def history(self) -> History:
        """All readings that are numbers, in bounded memory."""
        with self._lock:
            self._take()
            return self._history

    @property
    def alarms(self) -> list[Alarm]:
        """The last alarms, the oldest first."""
        with self._lock:
            self._take()
            return list(self._alarms)

    @property
    def active(self) -> list[Alarm]:
        """Alarms that have not ended, in the order in which they were raised."""
        with self._lock:
            self._take()
            return self.known_active()

    def known_active(self) -> list[Alarm]:
        """The same, without readings of images that still wait."""
        with self._lock:
            on = [t.alarm for t in self._tests.values() if t.on and t.alarm is not None]
            return sorted(on, key=lambda alarm: alarm.raised)

    @property
    def suspicion(self) -> float:
        """From 0 to 1, how much of the evidence for any alarm there is."""
        with self._lock:
            return max(test.suspicion for test in self._tests.values())

    def observe(self, x: Tensor, logits: Tensor) -> list[Alarm]:
        """Take readings of a batch that the live classifier has predicted, or let it wait.

        Args:
            x: The images.
            logits: What it returned for them.

        Returns:
            Alarms that were raised, and those that have ended.
        """
        return self._wait(x, logits)

    def observe_images(self, x: Tensor) -> list[Alarm]:
        """The same for a batch that the live classifier has not predicted."""
        return self._wait(x, None)

    def _wait(self, x: Tensor, logits: Tensor | None) -> list[Alarm]:
        with self._lock:
            events = [] if self._block.fits(x, logits) else self._take()
            self._block.add(x, logits)
            return events + self._take() if self._block.full else events

    def _take(self) -> list[Alarm]:
        """Take readings of all images that wait."""
        if not len(self._block):
            return []
        block = self._block.take()
        start, self._images = self._images, self._images + block.images
        if block.logits is None:
            events = self._look(block, start, self._labels())
            self._read(block.images, None, None)
            return events
        probs, view = self._told.probabilities(block.logits), method_of(self.live).view_in_use
        classes = self._told.unadjusted(self.live, block.logits)
        frequent = self._predictions.frequent()
        self._predictions.add(probs, classes, view)
        labels = self._labels()
        events = self._look(block, start, labels)
        if frequent is not None:  # chosen before these predictions were seen
            name = self._class_name(frequent)
            message = f"nearly all predictions are {name}, more than any labels explain"
            one = (classes == frequent).astype(np.float64)
            explained = float(self._told.explained[frequent])
            events += self._test("collapse", one, explained, start, message)
        events += self._doubt(probs, view, start)
        self._read(block.images, probs, labels)
        return events

    def refused(self, x: Any) -> None:
        """Count a batch that was refused, if its pixels are out of range."""
        with self._lock:
            if not out_of_range(x, method_of(self.live).inputs):
                return
            message = "batches are refused: pixels are far out of range or not finite"
            self._take()
            start, self._images = self._images, self._images + len(x)
            self._test("inputs", np.ones(min(len(x), LOOKED_AT)), MANY_OUTSIDE, start, message)

    def _look(self, block: Gathered, start: int, labels: Numbers) -> list[Alarm]:
        events, x = list[Alarm](), block.some
        self._looks = looks = self._pixels.look(x)
        if looks is not None:
            message = "the same image comes again and again"
            events += self._test("repeats", looks.repeated, MANY_REPEATED, start, message)
            if looks.outside is not None:
                message = "images look like none of those of the calibration"
                outside = looks.outside.astype(np.float64)
                events += self._test("inputs", outside, MANY_OUTSIDE, start, message)
        often = self._tests["statistics"].on
        predicted = None if block.logits is None else block.logits[block.places].argmax(1)
        if self._probe.look(x, predicted, labels, self._images, often) and self._probe.layers:
            distance, far = self._probe.distance, self._probe.far
            assert distance is not None
            assert far is not None
            message = "statistics of layers are far outside of all that was seen at calibration"
            hit = [float(distance > far)]
            events += self._test("statistics", hit, OFTEN_FAR, start, message)
        return events

    def _doubt(self, probs: Numbers, view: int, start: int) -> list[Alarm]:
        if self.accuracy is None:
            return []
        doubts = self._predictions.doubts(probs, view, self.accuracy)
        if doubts is None:
            return []
        message = f"accuracy is probably below {self.accuracy:.0%}"
        return self._test("accuracy", *doubts, start, message)

    def _test(self, kind: str, values: Any, bound: float, start: int, message: str) -> list[Alarm]:
        test = self._tests[kind]
        if not test.add(values, bound, start, self._images, message):
            return []
        return [self._keep(test)]

    def _keep(self, test: Test) -> Alarm:
        """Remember an alarm that was raised, or has ended."""
        assert test.alarm is not None
        if test.alarm.ended is not None:
            same = (test.kind, test.alarm.raised)
            self._alarms = [a for a in self._alarms if (a.kind, a.raised) != same]
        self._alarms = [*self._alarms, test.alarm][-KEPT:]
        if self.log is not None:
            self.log.add(test.alarm)
        return test.alarm

    def _labels(self) -> Numbers:
        """The label distribution of the stream, as the method or its predictions estimate it."""
        prior = getattr(self.live, "prior", None)
        if isinstance(prior, Tensor):
            return prior.detach().cpu().double().numpy()
        return self._predictions.mean

    def _read(self, block: int, probs: Numbers | None, labels: Numbers | None) -> None:
        looks: Looks | None = self._looks
        outside = None if looks is None or looks.outside is None else float(looks.outside.mean())
        readings: Readings = {
            "images": self._images,
            "block": block,
            **self._of_predictions(probs, labels),
            "appearance_distance": None if looks is None else looks.distance,
            "out_of_range": outside,
            "repeated": None if looks is None else float(looks.repeated.mean()),
            "covariate_distance": self._probe.distance,
            "agreement": self._probe.agreement,
            "alarms": sum(test.on for test in self._tests.values()),
            "covariate_distance_by_layer": dict(self._probe.layers or {}),
        }
        self._readings = readings
        self._history.add({name: readings[name] for name in NUMBERS})  # type: ignore[misc]

    def _of_predictions(self, probs: Numbers | None, labels: Any) -> Readings:
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
            "confidence": float(probs.max(1).mean()),
            "label_distance": None if source is None else label_distance(labels, source),
            "label_distance_by_chance": None
            if source is None
            else self._by_chance(source, self._predictions.weight),
            "pace": self._predictions.pace,
        }

    def _by_chance(self, labels: Numbers, images: float) -> float:
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
                    test.end(self._images)
                    self._keep(test)

    def suspend(self) -> None:
        """Forget the predictions, but not the images nor the alarms: others will be predicted."""
        with self._lock:
            self._take()
            self._predictions.restart()
            for kind, test in self._tests.items():
                if test.on:
                    test.retry()
                elif kind not in OF_IMAGES:
                    test.restart()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """All that `load_state` needs to go on, as files of tensors; alarms are in ``alarms``."""
        with self._lock:
            self._take()
            parts = {
                "predictions": self._predictions.state(),
                "pixels": self._pixels.state(),
                "probe": self._probe.state(),
                "history": self._history.state(),
                "evidence": tests_state(self._tests),
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
            self._history.load(parts["history"])
            self._images, self._alarms = images, list(alarms)
            load_tests(self._tests, parts["evidence"], alarms)


def _tensor(value: Any) -> Tensor:
    return torch.from_numpy(np.array(value, np.float64))


def _name(live: Live) -> str:
    return str(getattr(live, "name", ""))
