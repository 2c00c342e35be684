"""Predict images that are all known, in several passes over all of them.

Each pass maps parts to sums, which are reduced in the order of the parts; the last one predicts
with everything frozen. Batches are cut by position, so that it does not matter who runs which part,
and when. Finished parts are kept, and not run again.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote, unquote

from torch import Tensor

from twoshift.methods._passes import Passes, Sums, Whole
from twoshift.predict.build import Ready
from twoshift.predict.inputs import Gallery
from twoshift.predict.plan import Batch
from twoshift.predict.progress import Progress, facts_of
from twoshift.predict.shards import Extent, Found, Task, do
from twoshift.predict.table import Shape
from twoshift.predict.work import Work
from twoshift.storage import is_saved, read_folder, save_folder

SUMS, WHOLES = "sums of a part", "what a pass has found"  # kinds of saved folders
Launch = Callable[[Sequence[Task]], Iterator[Found]]


class Offline:
    """An offline run over a gallery.

    Args:
        ready: What predicts.
        gallery: The images.
        parts: The batches, by part.
        work: Where finished parts are kept.
        shape: What the table has.
        passes: Number of passes; a single one predicts by the source model.
        chunk: Batches that the first of several passes adapts to at once; parts have whole ones.
        launch: Runs parts, in any order; by default here, one after the other.
    """

    def __init__(
        self,
        ready: Ready,
        gallery: Gallery,
        parts: Sequence[Sequence[Batch]],
        work: Work,
        shape: Shape,
        passes: int,
        chunk: int,
        launch: Launch | None = None,
    ) -> None:
        self._ready, self._gallery, self.parts = ready, gallery, parts
        self._work, self._shape = work, shape
        self._passes = Passes(ready.live)
        self._count = passes if self._passes.adapts else 1
        self._chunk, self._launch = chunk, launch or self._here
        self._extents = _extents(gallery)

    def run(self, progress: Progress) -> None:
        """Do what is left to do."""
        wholes: dict[str, Whole] = {}
        for number in range(1, self._count):
            wholes = self._pass(number, wholes, progress)
        self._last(wholes, progress)

    def leave_states(self) -> None:
        """Nothing: the state of a whole is of no use to other images."""

    def _here(self, tasks: Sequence[Task]) -> Iterator[Found]:
        return (do(self._ready, self._gallery, task) for task in tasks)

    def _pass(
        self, number: int, wholes: Mapping[str, Whole], progress: Progress
    ) -> dict[str, Whole]:
        """A pass that sums up; what it finds of every stream."""
        home = self._work.folder / f"pass-{number}"
        if not is_saved(home):
            left = [n for n in range(len(self.parts)) if not is_saved(home / f"{n:06}")]
            report = self._report(number, left, wholes, progress)
            for found in self._launch([self._task(n, wholes, number - 1) for n in left]):
                _save_sums(home / f"{found.number:06}", found.sums)
                report(found.number)
            self._reduce(home)
        return _read_wholes(home)

    def _last(self, wholes: Mapping[str, Whole], progress: Progress) -> None:
        """The pass that predicts."""
        left = [n for n in range(len(self.parts)) if self._work.record(n) is None]
        report = self._report(self._count, left, wholes, progress)
        tasks = [self._task(n, wholes, self._count - 1, self._shape) for n in left]
        for found in self._launch(tasks):
            assert found.sheet is not None
            assert found.record is not None
            self._work.finish_part(found.number, found.sheet, asdict(found.record))
            report(found.number)

    def _task(
        self, number: int, wholes: Mapping[str, Whole], version: int, shape: Shape | None = None
    ) -> Task:
        batches = tuple(self.parts[number])
        streams = dict.fromkeys(batch.stream for batch in batches)
        known = {stream: wholes[stream] for stream in streams if stream in wholes}
        extents = {stream: self._extents[stream] for stream in streams}
        return Task(number, batches, extents, known, version, self._chunk, shape)

    def _reduce(self, home: Path) -> None:
        """Add up the sums of all parts, in their order; one stream after the other is whole."""
        wholes: dict[str, Whole] = {}
        name, total = "", self._passes.new()

        def close() -> None:
            if (whole := self._passes.whole(total)) is not None:
                wholes[name] = whole

        for part in range(len(self.parts)):
            for stream, sums in _read_sums(home / f"{part:06}").items():
                if stream != name:
                    close()
                    name, total = stream, self._passes.new()
                total.add(sums)
        close()
        _save_wholes(home, wholes)
        for part in range(len(self.parts)):
            shutil.rmtree(home / f"{part:06}", ignore_errors=True)

    def _report(
        self, number: int, left: Sequence[int], wholes: Mapping[str, Whole], progress: Progress
    ) -> Callable[[int], None]:
        sizes = [sum(b.stop - b.start for b in part) for part in self.parts]
        every = sum(sizes)
        done = number * every - sum(sizes[n] for n in left)
        labels = next(iter(wholes.values())).labels if len(wholes) == 1 else None
        facts = f"pass {number} of {self._count}"
        if labels is not None:
            facts = f"{facts}  {facts_of(labels, self._ready.classes)}"
        progress(done, self._count * every, facts)

        def report(part: int) -> None:
            nonlocal done
            done += sizes[part]
            progress(done, self._count * every, facts)

        return report


def _extents(gallery: Gallery) -> dict[str, Extent]:
    found, start = {}, 0
    for stream, images in itertools.groupby(gallery.streams):
        found[stream] = Extent(start, sum(1 for _ in images))
        start += found[stream].images
    return found


def _save_sums(folder: Path, sums: Mapping[str, Sums]) -> None:
    _save(folder, SUMS, sums, (s.tensors() for s in sums.values()))


def _read_sums(folder: Path) -> dict[str, Sums]:
    return {name: Sums.of(tensors) for name, tensors in _read(folder, SUMS).items()}


def _save_wholes(folder: Path, wholes: Mapping[str, Whole]) -> None:
    _save(folder, WHOLES, wholes, (whole.tensors() for whole in wholes.values()))


def _read_wholes(folder: Path) -> dict[str, Whole]:
    return {name: Whole.of(tensors) for name, tensors in _read(folder, WHOLES).items()}


def _save(
    folder: Path, kind: str, streams: Iterable[str], each: Iterable[Mapping[str, Tensor]]
) -> None:
    """One file of tensors for all streams, which the card names in order."""
    flat = {f"{i}.{name}": t for i, tensors in enumerate(each) for name, t in tensors.items()}
    names = [quote(stream, errors="surrogateescape") for stream in streams]  # cards are pure text
    save_folder(folder, kind, {"streams": names}, {"sums": flat})


def _read(folder: Path, kind: str) -> dict[str, dict[str, Tensor]]:
    saved = read_folder(folder, kind)
    names = [unquote(name, errors="surrogateescape") for name in saved.card["streams"]]
    found: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for path, tensor in saved.file("sums").items():
        number, _, name = path.partition(".")
        found[names[int(number)]][name] = tensor
    return found
