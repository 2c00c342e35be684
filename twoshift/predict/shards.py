"""One part of one pass: all that a worker needs to know, and what it finds.

A part is the same wherever it is run: here, in another process, or on another machine.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from twoshift.errors import DataMissing
from twoshift.methods._passes import Passes, Sums, Whole
from twoshift.predict.answers import Record, rows_of
from twoshift.predict.build import Ready, Recipe
from twoshift.predict.inputs import Gallery, open_gallery
from twoshift.predict.online import threshold_of, unadapted
from twoshift.predict.plan import Batch
from twoshift.predict.reading import as_type, read_batches
from twoshift.predict.table import Shape, Sheet


class Extent(NamedTuple):
    """Where the images of a stream lie: position of the first, and their number."""

    start: int
    images: int


@dataclass(frozen=True)
class Task:
    """A part of a pass.

    Attributes:
        number: Number of the part.
        batches: Its batches.
        extents: Where the streams of these lie.
        wholes: What the pass before has found of each of them; nothing for the first pass.
        version: Number of passes that the present state is made of.
        chunk: Batches that the first pass adapts to at once.
        shape: What the table has, in the last pass; None in the others.
    """

    number: int
    batches: tuple[Batch, ...]
    extents: Mapping[str, Extent]
    wholes: Mapping[str, Whole]
    version: int
    chunk: int = 1
    shape: Shape | None = None


@dataclass
class Found:
    """What a part has found: sums by stream, or rows of the table.

    Attributes:
        number: Number of the part.
        sums: Sums over its images, by stream.
        sheet: Rows of the table, in the last pass.
        record: What is remembered of them.
    """

    number: int
    sums: dict[str, Sums] = field(default_factory=dict)
    sheet: Sheet | None = None
    record: Record | None = None


def do(ready: Ready, gallery: Gallery, task: Task) -> Found:
    """Run a part of a pass."""
    passes, found = Passes(ready.live), Found(task.number)
    if task.shape is not None:
        found.sheet, found.record = Sheet(task.shape.columns()), Record.of(len(ready.classes))
        found.record.view = ready.live.view_in_use
    for stream in dict.fromkeys(batch.stream for batch in task.batches):
        whole = task.wholes.get(stream)
        own = [batch for batch in task.batches if batch.stream == stream]
        if task.shape is None:
            found.sums[stream] = passes.new()
            _sum_up(passes, ready, gallery, own, task, found.sums[stream])
            continue
        with passes.frozen(whole):
            _answer(passes, ready, gallery, own, task, found)
        assert found.record is not None
        images = sum(batch.stop - batch.start for batch in own)
        found.record.add_labels(None if whole is None else whole.labels, images)
    return found


def _sum_up(
    passes: Passes, ready: Ready, gallery: Gallery, batches: list[Batch], task: Task, sums: Sums
) -> None:
    """The sums of a stream: adapting from anew in the first pass, by frozen statistics later."""
    stream = batches[0].stream
    start, images = task.extents[stream]
    stride, look = passes.stride(images), passes.look if task.version else passes.follow
    size = task.chunk if task.version == 0 else len(batches)
    for _, chunk in itertools.groupby(batches, lambda batch: batch.number // size):
        state = passes.frozen(task.wholes.get(stream)) if task.version else passes.afresh()
        with state:
            for seen in read_batches(gallery, ready.decoding, list(chunk)):
                places = enumerate(seen.positions)
                sample = [i for i, place in places if (place - start) % stride == 0]
                if seen.x is not None:
                    look(as_type(seen.x, ready.live.dtype), sums, sample)


def _answer(
    passes: Passes, ready: Ready, gallery: Gallery, batches: list[Batch], task: Task, found: Found
) -> None:
    assert task.shape is not None
    assert found.sheet is not None
    assert found.record is not None
    threshold = threshold_of(ready.live)
    for seen in read_batches(gallery, ready.decoding, batches):
        logits = plain = None
        if seen.x is not None:
            x = as_type(seen.x, ready.live.dtype)
            logits = passes.look(x)
            plain = unadapted(ready, x) if task.shape.baseline else None
        found.sheet.add(rows_of(gallery, seen, logits, plain, task.version, task.shape))
        found.record.count(gallery, seen, logits, plain, threshold, ready.temperature)


@dataclass(frozen=True)
class Opening:
    """How a worker opens the model and the images by itself: from the same paths.

    Attributes:
        recipe: What predicts.
        source: The images, as `open_gallery` takes them.
        options: The rest of its arguments.
        identity: What the gallery must be.
    """

    recipe: Recipe
    source: str
    options: Mapping[str, Any]
    identity: str


_opened: dict[str, tuple[Ready, Gallery]] = {}
_opening = threading.Lock()


def do_elsewhere(opening: Opening, task: Task) -> Found:
    """Run a part of a pass on a worker, which opens model and images once."""
    with _opening:
        key = json.dumps(asdict(opening), sort_keys=True, default=str)
        if key not in _opened:
            _opened.clear()  # of an earlier run
            _opened[key] = _open(opening)
        ready, gallery = _opened[key]
    return do(ready, gallery, task)


def _open(opening: Opening) -> tuple[Ready, Gallery]:
    gallery = open_gallery(opening.source, **opening.options)
    if gallery.identity() != opening.identity:
        raise DataMissing(
            f"a worker finds other images in {opening.source}",
            cure="Every worker needs the same files under the same paths.",
        )
    return opening.recipe.open(), gallery
