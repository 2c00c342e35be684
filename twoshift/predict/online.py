"""Predict as images come: one pass, in which every batch also adapts the state of its stream.

A run that was killed goes on bit for bit: the state after a part is saved before the part counts as
finished, and the state before it is kept until then. So no image is counted twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twoshift.methods import LiveStream, Method
from twoshift.predict.answers import Record, rows_of
from twoshift.predict.build import Ready
from twoshift.predict.inputs import Gallery
from twoshift.predict.plan import Batch
from twoshift.predict.progress import Progress, facts_of
from twoshift.predict.reading import Decoding, as_type, read_batches
from twoshift.predict.table import Shape, Sheet
from twoshift.predict.work import Work, state_home
from twoshift.storage import is_saved, write_json

VERSION = "version.json"  # beside a state: how many batches it has taken in
POINTS = 200  # of the label estimate over time


class Online:
    """An online run over a gallery.

    Args:
        ready: What predicts.
        gallery: The images.
        decoding: How they are made of files.
        parts: The batches, by part.
        work: Where finished parts are kept.
        shape: What the table has.
        state: Folder with the states to go on from, and to leave behind; None for none.
    """

    def __init__(
        self,
        ready: Ready,
        gallery: Gallery,
        decoding: Decoding,
        parts: Sequence[Sequence[Batch]],
        work: Work,
        shape: Shape,
        state: Path | None = None,
    ) -> None:
        self._ready, self._gallery, self._decoding = ready, gallery, decoding
        self.parts, self._work, self._shape, self._state = parts, work, shape, state
        self._every = max(1, sum(map(len, parts)) // POINTS)
        self._stream: LiveStream[Method] | None = None
        self._version, self._batches = 0, 0

    def run(self, progress: Progress) -> None:
        """Do what is left to do."""
        done = 0
        for number, part in enumerate(self.parts):
            if self._work.record(number) is None:
                if done:
                    self._resume(number, part[0])
                    progress(done, len(self._gallery), "")
                break
            done += sum(batch.stop - batch.start for batch in part)
            self._batches += len(part)
        else:
            return
        for left in range(number, len(self.parts)):
            done = self._do(left, self.parts[left], done, progress)
        self._leave()

    def leave_states(self) -> None:
        """Write the final state of every stream to the folder that the user named."""
        if self._state is None:
            return
        last = {b.stream: n for n, part in enumerate(self.parts) for b in part}
        for stream, part in last.items():
            folder = self._work.state_folder(stream, part)
            live = self._ready.live.stream(stream)
            live.load(folder)
            home = state_home(self._state, stream, self._gallery.grouped)
            live.save(home)
            write_json(home / VERSION, {"version": version_of(folder)})
            live.close()

    def _resume(self, part: int, first: Batch) -> None:
        """Take up the stream that the last finished part has left open."""
        if first.number:
            self._enter(first.stream, self._work.state_folder(first.stream, part - 1))

    def _begin(self, name: str) -> None:
        home = self._state and state_home(self._state, name, self._gallery.grouped)
        self._enter(name, home if home is not None and is_saved(home) else None)

    def _enter(self, name: str, folder: Path | None) -> None:
        self._leave()
        self._stream, self._version = self._ready.live.stream(name), 0
        if folder is not None:
            self._stream.load(folder)
            self._version = version_of(folder)

    def _leave(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def _do(self, number: int, part: Sequence[Batch], done: int, progress: Progress) -> int:
        ready, gallery = self._ready, self._gallery
        sheet, record = Sheet(self._shape.columns()), Record.of(len(ready.classes))
        threshold, touched = threshold_of(ready.live), dict[str, None]()
        since = part[0].start
        for seen in read_batches(gallery, self._decoding, part):
            batch = seen.batch
            if batch.number == 0:
                self._begin(batch.stream)
                since = batch.start
            assert self._stream is not None
            touched[batch.stream] = None
            logits = plain = None
            if seen.x is not None:
                x = as_type(seen.x, ready.live.dtype)
                logits, self._version = self._stream(x), self._version + 1
                plain = unadapted(ready, x) if self._shape.baseline else None
            sheet.add(rows_of(gallery, seen, logits, plain, self._version, self._shape))
            record.count(gallery, seen, logits, plain, threshold, ready.temperature)
            done += batch.stop - batch.start
            if self._batches % self._every == 0:
                record.trace.append(self._point(batch))
            self._batches += 1
            ends = batch == part[-1] or self._ends(batch)
            if ends:
                record.add_labels(prior_of(self._stream), batch.stop - since)
            if ends and (self._state is not None or batch == part[-1]):
                self._save(batch.stream, number)
            progress(done, len(gallery), facts_of(prior_of(self._stream), ready.classes))
        record.view = self._ready.live.view_in_use
        self._work.finish_part(number, sheet, asdict(record))
        for stream in touched:
            self._work.forget_states(stream, but=number)
        return done

    def _ends(self, batch: Batch) -> bool:
        streams = self._gallery.streams
        return batch.stop == len(streams) or streams[batch.stop] != batch.stream

    def _save(self, name: str, part: int) -> None:
        assert self._stream is not None
        folder = self._work.state_folder(name, part)
        self._stream.save(folder)
        write_json(folder / VERSION, {"version": self._version})

    def _point(self, batch: Batch) -> dict[str, Any]:
        assert self._stream is not None
        prior, expected = prior_of(self._stream), self._stream.expected_accuracy
        return {
            "image": batch.stop,
            "stream": batch.stream,
            "labels": None if prior is None else [round(p, 6) for p in prior.tolist()],
            "accuracy": None if expected is None else list(expected),
        }


def version_of(folder: Path) -> int:
    """How many batches a saved state has taken in, where a run has noted it."""
    try:
        return int(json.loads((folder / VERSION).read_text())["version"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0  # a state that was saved otherwise


def prior_of(stream: LiveStream[Any]) -> Tensor | None:
    """The label distribution of a stream, for a method that has one."""
    try:
        return stream.prior
    except AttributeError:
        return None


def threshold_of(live: Method) -> float:
    """The confidence above which an image is sure."""
    accuracy = getattr(live, "accuracy", None)
    return 1.0 if accuracy is None else float(accuracy.judge[live.view_in_use, -1])


@torch.no_grad()
def unadapted(ready: Ready, x: Tensor) -> Tensor:
    """Logits of the classifier as it is."""
    logits: Tensor = ready.plain(x.to(next(ready.plain.parameters()).device))
    return logits
