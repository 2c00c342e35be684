"""A live classifier that falls back when something is wrong, and comes back when it is over."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, NonNegativeInt
from torch import Tensor

from twoshift import storage
from twoshift.calibration import Calibration
from twoshift.errors import BatchError, CheckpointError, MismatchError, SettingError
from twoshift.methods import Method, Source
from twoshift.methods._state import State
from twoshift.recommend import recommended
from twoshift.registry import check_choice, check_numbers
from twoshift.watch._unadapted import Live, method_of
from twoshift.watch.alarms import OF_IMAGES, Alarm
from twoshift.watch.watch import Watch

KIND = "guard"
LIVE, LAST_GOOD, RECOMMENDED, UNADAPTED = "live", "last_good", "recommended", "unadapted"
BY_CAUSE = "by_cause"
POLICIES = (BY_CAUSE, LAST_GOOD, RECOMMENDED, UNADAPTED)
# half as much of the stream, twice as slow
SAFER: dict[str, Any] = {"share": 0.3, "half_life": 842.0}
CALM = 0.25  # a state is good if there is less than this share of the evidence for an alarm
REST, LONGEST_REST = 512, 1 << 16  # images before a method that failed is tried again
TRIAL = 512  # images that it is tried for
KEPT = 256  # switches


class Good(NamedTuple):
    """A state that nothing spoke against, and the number of images after which it was taken."""

    images: int
    state: State


class Switch(NamedTuple):
    """A change of what predicts.

    Attributes:
        images: After how many images.
        to: What predicts from then on.
        because: Why.
    """

    images: int
    to: str
    because: str


@storage.card_of(KIND)
class GuardCard(BaseModel):
    """Fields of the card of a guard."""

    model: str
    policy: str
    mode: str
    images: NonNegativeInt
    good: list[NonNegativeInt]
    alarms: list[dict[str, Any]]
    rest: NonNegativeInt
    waited: NonNegativeInt
    returned: int
    trial: int | None


class Guard:
    """Predicts by a live classifier, and by something safer as long as there is an alarm.

    It is called like the classifier, which it watches. Now and then, if nothing speaks against it,
    it keeps a copy of the state. When an alarm is raised, the state goes back to the last copy from
    before the change. It then predicts

    - by that state, as it is (``"last_good"``),
    - by `recommended` with more weight on the source (``"recommended"``),
    - or by the model as it was given (``"unadapted"``).

    ``"by_cause"`` takes the last good state where images are wrong, whatever is predicted for them,
    and the unadapted model where only predictions are. When images are as usual again, the
    classifier goes on from the last good state. After an alarm of predictions, it is tried after a
    while, on the same images but without being heard, and comes back if the evidence is that they
    are good; if not, it rests twice as long.

    Args:
        live: A method, such as ``recommended(...)``, or a stream of one.
        facts: The calibration of its classifier, or the folder where it was saved.
        policy: What to fall back to.
        keep: Number of good states that are kept.
        every: Images between two of them.
        watch: Settings of `Watch`.

    Attributes:
        watch: What watches the classifier: ``guard.watch.readings``, ``guard.watch.alarms``.
        mode: What predicts: ``"live"``, or what it has fallen back to.
        switches: What has predicted, since when, and why; the last changes.
    """

    def __init__(
        self,
        live: Live,
        facts: Calibration | str | Path,
        *,
        policy: str = BY_CAUSE,
        keep: int = 4,
        every: int = 512,
        **watch: Any,
    ) -> None:
        check_choice("guard", POLICIES, policy=policy)
        check_numbers("guard", "a whole number from 1", keep=keep, every=every)
        if keep > 32:
            raise SettingError("keep of guard", must_be="at most 32", got=keep)
        self.live, self.policy, self.keep, self.every = live, policy, keep, every
        self.watch = Watch(live, facts, **watch)
        self._lock = threading.RLock()
        self._fallbacks: dict[str, Method] = {}
        self.switches: deque[Switch] = deque(maxlen=KEPT)
        self._begin()

    def _begin(self) -> None:
        self.mode = LIVE
        self.switches.clear()
        self._first = Good(0, self.live.state())
        self._good: deque[Good] = deque(maxlen=self.keep)
        self._rest, self._waited, self._returned = REST, 0, -LONGEST_REST * 4
        self._trial: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Predict a batch; as long as all is well, by the live classifier, which adapts."""
        with self._lock:
            try:
                return self._live(x) if self.mode == LIVE else self._fallen(x)
            except BatchError:
                self.watch.refused(x)
                if self.mode == LIVE and (alarms := self.watch.known_active()):
                    self._fall(alarms)
                raise

    def _live(self, x: Tensor) -> Tensor:
        logits = self.live(x)
        self.watch.observe(x, logits)
        if alarms := self.watch.known_active():
            self._fall(alarms)
            return self._fallback(x)
        images = self.watch.images
        last = self._good[-1].images if self._good else max(self._returned, 0)
        if images - last >= self.every and self.watch.suspicion < CALM:
            self._good.append(Good(images, self.live.state()))
        return logits

    def _fall(self, alarms: list[Alarm]) -> None:
        """Return to the last state from before the change, and predict by something else."""
        alarms = self._causes(alarms)
        since = min(alarm.since for alarm in alarms)
        while self._good and self._good[-1].images > since:
            self._good.pop()
        self.live.load_state(self._last_good.state)
        soon = self.watch.images - self._returned < 4 * self._rest
        self._rest = min(2 * self._rest, LONGEST_REST) if soon else REST
        self._waited, self._trial = 0, None
        self._choose(alarms)
        self.watch.suspend()

    def _choose(self, alarms: list[Alarm]) -> None:
        mode = self.policy
        if mode == BY_CAUSE:
            mode = LAST_GOOD if alarms[0].kind in OF_IMAGES else UNADAPTED
        if mode not in (self.mode, LAST_GOOD):
            self._method(mode).reset()
        self._switch(mode, "; ".join(alarm.message for alarm in alarms))

    def _causes(self, alarms: list[Alarm]) -> list[Alarm]:
        """The alarms that matter: wrong images explain wrong predictions."""
        of_images = [alarm for alarm in alarms if alarm.kind in OF_IMAGES]
        if of_images:
            self.watch.dismiss([alarm.kind for alarm in alarms if alarm not in of_images])
        return of_images or alarms

    @property
    def _last_good(self) -> Good:
        return self._good[-1] if self._good else self._first

    def _switch(self, mode: str, because: str) -> None:
        self.mode = mode
        self.switches.append(Switch(self.watch.images, mode, because))

    def _fallen(self, x: Tensor) -> Tensor:
        """Predict by what it has fallen back to, and look whether that is still needed."""
        logits = self._fallback(x)
        if any(alarm.kind in OF_IMAGES for alarm in self.watch.known_active()):
            self._end_trial()
        elif self._trial is None and self.watch.known_active():
            self._waited += len(x)
            if self._waited >= self._rest:
                self._trial = 0
                self.watch.suspend()
        if self._trial is None:
            self.watch.observe_images(x)
        else:
            self.watch.observe(x, self.live(x))
            self._trial += len(x)
        kinds = {alarm.kind for alarm in self.watch.known_active()}
        if not kinds:
            self._return()
        elif kinds & {*OF_IMAGES} and kinds - {*OF_IMAGES}:  # found only now
            self._end_trial()
            self._choose(self._causes(self.watch.known_active()))
        elif self._trial is not None and self._trial >= TRIAL:
            self._end_trial()
            self._rest = min(2 * self._rest, LONGEST_REST)
        return logits

    def _end_trial(self) -> None:
        if self._trial is not None:
            self.live.load_state(self._last_good.state)
        self._trial, self._waited = None, 0

    def _return(self) -> None:
        self._trial, self._returned = None, self.watch.images
        self._switch(LIVE, "the alarm is over")
        self.watch.suspend()

    def _fallback(self, x: Tensor) -> Tensor:
        if self.mode != LAST_GOOD:
            return self._method(self.mode)(x)
        now = self.live.state()
        try:
            self.live.load_state(self._last_good.state)
            return self.live(x)
        finally:
            self.live.load_state(now)

    def _method(self, mode: str) -> Method:
        """What predicts in a mode; made when it is first needed."""
        if mode not in self._fallbacks:
            source, facts = self.watch.source, self.watch.facts
            streams = facts.of("running").get("moments") is not None and facts.held_out
            if mode == RECOMMENDED:
                made: Method = recommended(source, facts, **(SAFER if streams else {}))
            else:
                made = Source(source)
                if (inputs := method_of(self.live).inputs) is not None:
                    made.expect(inputs)
            self._fallbacks[mode] = made
        return self._fallbacks[mode]

    def describe(self) -> str:
        """What predicts now, and why, in a line."""
        with self._lock:
            if self.mode == LIVE:
                return f"guarded: {method_of(self.live).describe()}"
            return f"fallen back to {self.mode}: {self.switches[-1].because}"

    def reset(self) -> None:
        """Return to the initial state of the live classifier, and forget what was seen."""
        with self._lock:
            self.live.reset()
            self.watch.restart()
            self._begin()

    def save(self, folder: str | Path) -> None:
        """Write everything to ``folder``, in one step; the folder may exist."""
        with self._lock:
            tensors: dict[str, Any] = {"state": self.live.state(), "first": self._first.state}
            tensors |= {f"good_{i}": good.state for i, good in enumerate(self._good)}
            tensors |= {f"watch_{name}": part for name, part in self.watch.state().items()}
            if self.mode in self._fallbacks:
                tensors["fallback"] = self._fallbacks[self.mode].state()
            card = {
                "model": method_of(self.live).origin(),
                "policy": self.policy,
                "mode": self.mode,
                "images": self.watch.images,
                "good": [good.images for good in self._good],
                "alarms": [alarm.as_dict() for alarm in self.watch.alarms],
                "rest": self._rest,
                "waited": self._waited,
                "returned": self._returned,
                "trial": self._trial,
            }
        storage.save_folder(folder, KIND, card, tensors)

    def load(self, folder: str | Path) -> None:
        """Go on from a saved guard of the same model and method with the same settings."""
        saved = storage.read_folder(folder, KIND)
        card = saved.card
        if card["model"] != method_of(self.live).origin():
            raise MismatchError(
                f"the guard in {folder} belongs to another model or method",
                cure="Build the live classifier as it was when the guard was saved.",
            )
        with self._lock, storage.misfits(saved.folder, foreign_only=True):
            if card["mode"] not in (LIVE, *POLICIES[1:]) or len(card["good"]) > self.keep:
                raise CheckpointError(f"{saved.folder} was saved with other settings")
            before = self.live.state()
            try:
                good = [saved.file(f"good_{i}") for i in range(len(card["good"]))]
                for state in (saved.file("first"), *good, saved.file("state")):
                    self.live.load_state(state)  # each is checked
                parts = {
                    name.removeprefix("watch_"): part
                    for name, part in saved.tensors.items()
                    if name.startswith("watch_")
                }
                alarms = [Alarm(**alarm) for alarm in card["alarms"]]
                if "fallback" in saved.tensors:
                    self._method(card["mode"]).load_state(saved.file("fallback"))
                self.watch.load_state(parts, card["images"], alarms)
            except BaseException:
                self.live.load_state(before)
                raise
            self._first = Good(0, saved.file("first"))
            pairs = zip(card["good"], good, strict=True)
            self._good = deque((Good(*pair) for pair in pairs), maxlen=self.keep)
            self.mode, self._rest, self._waited = card["mode"], card["rest"], card["waited"]
            self._returned, self._trial = card["returned"], card["trial"]
            self.switches.clear()
            if self.mode != LIVE:
                self.switches.append(Switch(card["images"], self.mode, "loaded"))
