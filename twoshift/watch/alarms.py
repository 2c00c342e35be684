"""Alarms: what is wrong with a stream, since when, how sure that is, and what to do about it."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twoshift.errors import DataError
from twoshift.registry import check_numbers
from twoshift.storage import storage_errors
from twoshift.watch.evidence import Evidence

FILE = "alarms.jsonl"
KINDS = {  # and what to do
    "accuracy": "Label some of these images and measure; let a Guard fall back to the unadapted "
    "model, or calibrate again with images like these.",
    "collapse": "Reset the method, or let a Guard return to the last good state; a smaller "
    "learning rate may prevent it.",
    "inputs": "Check the camera, and that images are prepared as for the calibration.",
    "repeats": "Check the camera and whatever reads its images.",
    "statistics": "Check the images; if they are right, calibrate again with images like these.",
}
OF_IMAGES = ("inputs", "repeats", "statistics")  # the others are of predictions
ALPHA = 0.05  # probability of any false alarm, ever
OVER = 0.05  # level of the evidence that an alarm is over
FIELDS = ("kind", "message", "advice", "since", "raised", "sure", "ended")


@dataclass(frozen=True)
class Alarm:
    """Something that is wrong.

    Attributes:
        kind: One of ``accuracy``, ``collapse``, ``inputs``, ``repeats``, ``statistics``.
        message: What is wrong, in a sentence.
        advice: What to do.
        since: Number of images before the change, as the evidence tells.
        raised: Number of images after which the evidence was enough.
        sure: One minus the probability that such evidence ever appears in a healthy stream.
        ended: Number of images after which the evidence was that all is well again; None as long
            as it is not.
    """

    kind: str
    message: str
    advice: str
    since: int
    raised: int
    sure: float
    ended: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """All of it for a log."""
        return asdict(self)

    def __str__(self) -> str:
        since = f"since image {self.since}, {self.sure:.1%} sure at image {self.raised}"
        over = "" if self.ended is None else f", over at image {self.ended}"
        return f"{self.kind}: {self.message} ({since}{over}). {self.advice}"


class Test:
    """One kind of alarm: evidence against "all is well", and once it is raised, for it.

    Args:
        kind: The kind of alarm.
        alpha: Probability that it is ever raised by a healthy stream.
        kinds: Number of kinds that share ``sure``.
        usual: It is over when the mean is below this, where that is more than the bound.
    """

    __test__ = False  # not for pytest

    def __init__(self, kind: str, alpha: float, kinds: int, usual: float = 0.0) -> None:
        self.kind, self._kinds, self._usual = kind, kinds, usual
        self._level, self._over = math.log(1 / alpha), math.log(1 / OVER)
        self.alarm: Alarm | None = None
        self._wrong, self._right = Evidence(), Evidence()

    def add(self, values: ArrayLike, bound: float, start: int, end: int, message: str) -> bool:
        """Take in observations, whose mean is at most ``bound`` if all is well.

        Args:
            values: Numbers from 0 to 1, (B,).
            bound: The bound, above 0 and below 1.
            start: Number of images before these.
            end: Number of images after these.
            message: What is wrong if the mean is larger.

        Returns:
            Whether an alarm was raised or ended; it is in ``alarm``.
        """
        x: NDArray[np.float64] = np.asarray(values, np.float64)
        if self.alarm is None or self.alarm.ended is not None:
            self._wrong.add(x, bound, start)
            if self._wrong.log_capital < self._level:
                return False
            sure = 1 - min(1.0, self._kinds * math.exp(-self._wrong.log_capital))
            advice, since = KINDS[self.kind], self._wrong.since
            self.alarm = Alarm(self.kind, message, advice, since, end, sure)
            self._right.restart()
            return True
        self._right.add(1 - x, 1 - max(bound, self._usual), start)
        if self._right.log_capital < self._over:
            return False
        self.end(end)
        return True

    def end(self, images: int) -> None:
        """The alarm is over, after so many images; evidence is collected from the beginning."""
        assert self.alarm is not None
        self.alarm = replace(self.alarm, ended=images)
        self._wrong.restart()

    @property
    def on(self) -> bool:
        """Whether there is an alarm that has not ended."""
        return self.alarm is not None and self.alarm.ended is None

    @property
    def suspicion(self) -> float:
        """From 0 to 1, how much of the evidence for an alarm there is."""
        return 1.0 if self.on else min(max(self._wrong.log_capital / self._level, 0.0), 1.0)

    def restart(self) -> None:
        """Forget the evidence, and the alarm."""
        self.alarm = None
        self._wrong.restart()
        self._right.restart()

    def retry(self) -> None:
        """Collect the evidence that the alarm is over from the beginning."""
        self._right.restart()

    def state(self) -> dict[str, Any]:
        """All that `load` needs to go on; numbers, rows of numbers, and the alarm."""
        return {"wrong": self._wrong.state(), "right": self._right.state()}

    def load(self, state: Mapping[str, Any], alarm: Alarm | None) -> None:
        """Go on from a `state`."""
        self._wrong.load(state["wrong"])
        self._right.load(state["right"])
        self.alarm = alarm


def make_tests(alpha: float = ALPHA) -> dict[str, Test]:
    """All kinds of alarms; together, they are false with probability ``alpha`` at most."""
    check_numbers("watch", "above 0", alpha=alpha)
    usual = {"statistics": 0.5}  # seldom looked at, and hardly ever far
    each = alpha / len(KINDS)
    return {kind: Test(kind, each, len(KINDS), usual.get(kind, 0.0)) for kind in KINDS}


def tests_state(tests: Mapping[str, Test]) -> dict[str, Any]:
    """The evidence of all kinds, by flat names."""
    return {
        f"{kind}.{side}.{name}": value
        for kind, test in tests.items()
        for side, evidence in test.state().items()
        for name, value in evidence.items()
    }


def load_tests(tests: Mapping[str, Test], state: Mapping[str, Any], alarms: list[Alarm]) -> None:
    """Go on from what `tests_state` returned, and the alarms until then."""
    for kind, test in tests.items():
        sides: dict[str, dict[str, Any]] = {"wrong": {}, "right": {}}
        for name, value in state.items():
            of, side, part = name.split(".")
            if of == kind:
                sides[side][part] = value
        last = [alarm for alarm in alarms if alarm.kind == kind]
        test.load(sides, last[-1] if last else None)


class AlarmLog:
    """A file of alarms in a folder, one JSON object per line; several processes may append to it.

    Args:
        folder: Where ``alarms.jsonl`` is, or will be.
        stream: Whose alarms these are, if several streams share the folder.
    """

    def __init__(self, folder: str | Path, stream: str = "") -> None:
        self.path, self.stream = Path(folder) / FILE, stream

    def add(self, alarm: Alarm) -> None:
        """Append an alarm that was raised, or has ended: one line, written at once."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = json.dumps({"time": now, "stream": self.stream, **alarm.as_dict()}) + "\n"
        with storage_errors("cannot write", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            with os.fdopen(os.open(self.path, flags, 0o666), "r+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                cut = _ends_in_a_line(file.fileno())  # by somebody who was killed
                os.write(file.fileno(), (("" if cut else "\n") + line).encode())
                os.fsync(file.fileno())


def _ends_in_a_line(file: int) -> bool:
    size = os.fstat(file).st_size
    return not size or os.pread(file, 1, size - 1) == b"\n"


def read_log(folder: str | Path) -> tuple[list[dict[str, Any]], int]:
    """The alarms in a folder, each as it was last, in the order of their beginning.

    Args:
        folder: A folder with ``alarms.jsonl``, or the file itself.

    Returns:
        The alarms, and the number of lines that cannot be read.
    """
    path = Path(folder)
    path = path if path.is_file() else path / FILE
    if not path.is_file():
        cure = "Name the folder that was given to Watch or Guard as log=."
        raise DataError(f"no alarms in {folder}: {FILE} is missing", cure=cure)
    with storage_errors("cannot read", path):
        lines = path.read_text("utf-8", errors="replace").splitlines()
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    bad = 0
    for line in filter(str.strip, lines):
        alarm = _parsed(line)
        if alarm is None:
            bad += 1
            continue
        key = tuple(alarm[name] for name in ("stream", "kind", "since", "raised"))
        # when it was raised counts, and whether it is over
        found[key] = {**alarm, "time": found.get(key, alarm)["time"]}
    return list(found.values()), bad


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        alarm = json.loads(line)
    except (ValueError, RecursionError):
        return None
    names: Iterable[str] = (*FIELDS, "time", "stream")
    whole = isinstance(alarm, dict) and all(
        isinstance(alarm.get(name), str | int | float | None) and name in alarm for name in names
    )
    return {name: alarm[name] for name in names} if whole else None
