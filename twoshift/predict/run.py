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
from twoshift.predict.build import Ready
from twoshift.predict.inputs import Gallery
from twoshift.predict.online import Online
from twoshift.predict.plan import PART, cut, parts_of
from twoshift.predict.progress import Progress, silent
from twoshift.predict.summary import summarise
from twoshift.predict.table import Shape
from twoshift.predict.work import LOCK, Work, state_home
from twoshift.registry import check_numbers
from twoshift.storage import CARD, fingerprint, is_saved, only_one, sha256, split_tensors

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
    """

    out: Path
    batch_size: int = 64
    state: Path | None = None
    top: int = 1
    probabilities: bool = False
    baseline: bool = True
    overwrite: bool = False
    part: int = PART

    def __post_init__(self) -> None:
        numbers = {"batch_size": self.batch_size, "top": self.top, "part": self.part}
        check_numbers("predict", "a whole number from 1", **numbers)


def predict(
    ready: Ready, gallery: Gallery, options: Options, progress: Progress = silent
) -> dict[str, Any]:
    """Predict all images into a table; the same call goes on after a kill.

    Args:
        ready: What predicts.
        gallery: What is predicted.
        options: How, and where to.
        progress: Called after every batch.

    Returns:
        The summary, see `summarise`.
    """
    if options.top > len(ready.classes):
        must_be = f"1 to {len(ready.classes)}, the number of classes"
        raise SettingError("--top", must_be=must_be, got=options.top)
    work = Work(options.out)
    shape = Shape(ready.classes, True, options.baseline, options.top, options.probabilities)
    parts = parts_of(cut(gallery, options.batch_size), options.part)
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
        online = Online(ready, gallery, ready.decoding, parts, work, shape, options.state)
        online.run(progress)
        summary = _summary(work, ready, len(parts))
        if summary["errors"] == summary["images"]:
            work.remove()
            what = f"none of the {len(gallery):,} images of {gallery.name} can be read"
            raise DataCorrupt(f"{what}; the first: {summary['first_error']}")
        work.leaving()
        online.leave_states()
        work.join(len(parts))
        work.finish(settings, summary)
    return summary


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
