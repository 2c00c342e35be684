"""One run, from what a user asks to the finished table."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from twoshift.errors import DataCorrupt, SettingError
from twoshift.methods import LabelAware, Method
from twoshift.methods._passes import refusal
from twoshift.predict.build import Ready
from twoshift.predict.inputs import Gallery
from twoshift.predict.offline import Launch, Offline
from twoshift.predict.online import Online
from twoshift.predict.plan import PART, chunk_of, cut, parts_of
from twoshift.predict.progress import Progress, silent
from twoshift.predict.summary import summarise
from twoshift.predict.table import Shape
from twoshift.predict.work import LOCK, Work, state_home
from twoshift.registry import check_numbers
from twoshift.storage import CARD, fingerprint, is_saved, only_one, sha256, split_tensors

PASSES = 2  # of an offline run: a third one gains little, see docs/predict.md
FORMAT = 1  # of what a run leaves behind for the next


@dataclass(frozen=True)
class Options:
    """How to predict, beside what predicts and what is predicted.

    Attributes:
        out: File of the table: ``.parquet`` or ``.csv``.
        batch_size: Images that are predicted together.
        state: Folder with the state to go on from and to leave behind, for an online run.
        top: How many of the likeliest classes to write.
        probabilities: Whether to write all probabilities.
        baseline: Whether to run the unadapted model, too, for comparison.
        overwrite: Whether to replace a table that was made or begun with other settings.
        part: Images after which finished work is written.
        passes: Number of passes of an offline run; None for an online one.
    """

    out: Path
    batch_size: int = 64
    state: Path | None = None
    top: int = 1
    probabilities: bool = False
    baseline: bool = True
    overwrite: bool = False
    part: int = PART
    passes: int | None = None

    def __post_init__(self) -> None:
        numbers = {"batch_size": self.batch_size, "top": self.top, "part": self.part}
        numbers |= {"passes": 1 if self.passes is None else self.passes}
        check_numbers("predict", "a whole number from 1", **numbers)
        if self.passes is not None and self.state is not None:
            cure = "Offline, all images are known, and every run starts anew."
            raise SettingError("--state", must_be="used with an online run", cure=cure)


def predict(
    ready: Ready,
    gallery: Gallery,
    options: Options,
    progress: Progress = silent,
    launch: Launch | None = None,
) -> dict[str, Any]:
    """Predict all images into a table; the same call goes on after a kill.

    Args:
        ready: What predicts.
        gallery: What is predicted.
        options: How, and where to.
        progress: Called after every batch.
        launch: Runs the parts of an offline run; by default here.

    Returns:
        The summary, see `summarise`.
    """
    if options.top > len(ready.classes):
        must_be = f"1 to {len(ready.classes)}, the number of classes"
        raise SettingError("--top", must_be=must_be, got=options.top)
    if launch is not None and options.passes is None:
        raise SettingError("other processes", must_be="used with an offline run", cure="--offline")
    if options.passes is not None and (reason := refusal(ready.live)):
        raise SettingError("an offline run", must_be="of another method", cure=reason)
    work = Work(options.out)
    with ExitStack() as held:
        held.enter_context(work.alone())
        if options.state is not None:
            says = f"goes on with the state in {options.state}"
            held.enter_context(only_one(options.state / LOCK, says))
        settings = _settings(ready, gallery, options)
        done = work.begin(settings, options.overwrite, _start(gallery, options.state))
        if done is not None:
            summary: dict[str, Any] = done["summary"]
            return summary
        run = _run(ready, gallery, options, work, launch)
        run.run(progress)
        summary = _summary(work, ready, len(run.parts))
        if summary["errors"] == summary["images"]:
            work.remove()
            what = f"none of the {len(gallery):,} images of {gallery.name} can be read"
            raise DataCorrupt(f"{what}; the first: {summary['first_error']}")
        work.leaving()
        run.leave_states()
        work.join(len(run.parts))
        work.finish(settings, summary)
    return summary


def _run(
    ready: Ready, gallery: Gallery, options: Options, work: Work, launch: Launch | None
) -> Online | Offline:
    online, batches = options.passes is None, cut(gallery, options.batch_size)
    shape = Shape(ready.classes, online, options.baseline, options.top, options.probabilities)
    if options.passes is None:
        parts = parts_of(batches, options.part)
        return Online(ready, gallery, ready.decoding, parts, work, shape, options.state)
    chunk = chunk_of(options.batch_size)
    parts = parts_of(batches, options.part, chunk)
    return Offline(ready, gallery, parts, work, shape, options.passes, chunk, launch)


def _summary(work: Work, ready: Ready, parts: int) -> dict[str, Any]:
    records = (work.record(number) for number in range(parts))
    accuracy = getattr(ready.live, "accuracy", None)
    judge = None if accuracy is None else accuracy.judge
    whole = (record for record in records if record is not None)
    return summarise(whole, ready.classes, ready.training_labels, judge)


def _settings(ready: Ready, gallery: Gallery, options: Options) -> dict[str, Any]:
    """All that decides the table."""
    return {
        "format": FORMAT,
        "images": gallery.identity(),
        "model": ready.live.origin(),
        "method": _described(ready.live),
        "classes": list(ready.classes),
        "decoding": asdict(ready.decoding),
        "batch size": options.batch_size,
        "part": options.part,
        "passes": options.passes,
        "state": None if options.state is None else str(options.state.absolute()),
        "top": options.top,
        "probabilities": options.probabilities,
        "baseline": options.baseline,
    }


def _described(live: Method) -> str:
    """A method and its settings; tensors among them by their hash."""
    owners: dict[str, Any] = {"method": live}
    if isinstance(live, LabelAware):
        owners = {"method": live.method, "estimator": live.estimator}
    parts = []
    for owner, entry in owners.items():
        plain, tensors = split_tensors(owner, entry.settings())
        digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode())
        digest.update(fingerprint(tensors).encode())
        parts.append(f"{type(entry).__name__} {digest.hexdigest()[:12]}")
    return ", ".join(parts)


def _start(gallery: Gallery, state: Path | None) -> str | None:
    """Hash of the states that a run begins with."""
    if state is None:
        return None
    digest = hashlib.sha256()
    for stream in dict.fromkeys(gallery.streams):
        home = state_home(state, stream, gallery.grouped)
        if is_saved(home):
            digest.update(f"{stream}\0{sha256(home / CARD)}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
