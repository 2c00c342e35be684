"""Accuracy with and without a guard: after poison, under labels that spoil a method, and in health.

    python -m reproduction.guard --data DIR

Runs TENT and `recommended` on the source model ``cifar10-bn`` and IABN on ``cifar10-iabn``, each
alone and with a `Guard`, over two corruptions. A poisoned stream is 15 healthy batches, 30 poisoned
ones whose pixels are in range, and 30 healthy ones, which count. About ten minutes on a core; run
again after an interruption, it continues. Remove ``results/guard.json`` to measure again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reproduction import markdown
from twoshift import IABN, Calibration, Method, Tent, priors, recommended
from twoshift.bench.provenance import revision, run_facts
from twoshift.data import load
from twoshift.data.base import ImageSet
from twoshift.data.corrupted import corrupted
from twoshift.data.stream import Stream
from twoshift.methods._appearance import Appearances
from twoshift.storage import write_json
from twoshift.train import reading
from twoshift.train.adapter import source_images
from twoshift.train.checkpoint import SourceModel, load_source
from twoshift.watch import Guard

FILE = Path("results/guard.json")
START, END = "<!-- guard:start -->", "<!-- guard:end -->"
CORRUPTIONS, SEVERITY, BATCH = ("gaussian_noise", "contrast"), 5, 64
BEFORE, POISONED, AFTER, SOON = 15, 30, 30, 8  # batches
CLASS = 3  # of the poison of one class
METHODS: dict[str, tuple[str, Callable[[SourceModel, Calibration], Method]]] = {
    "TENT": ("cifar10-bn", lambda source, facts: Tent(source.model)),
    "IABN": ("cifar10-iabn", lambda source, facts: IABN(source.model)),
    "recommended": ("cifar10-bn", lambda source, facts: recommended(source.model, facts)),
}
POISONS = ("black", "noise", "one class", "repeated")
HEALTHY = {"U": "uniform", "F50": "forward-50", "B50": "backward-50"}
SPOILING = "dirichlet-0.1"
Batches = list[tuple[Tensor, Tensor | None]]
Result = dict[str, Any]


def known(name: str, data: Path) -> tuple[SourceModel, Calibration]:
    """A source model and its calibration, with what its training images look like."""
    source, facts = load_source(f"checkpoints/{name}"), Calibration.load(f"checkpoints/{name}")
    images, looks = source_images(source, data), Appearances()
    for x in reading.tensors(images.images, reading.in_parts(len(images), images.images)):
        looks.add(x)
    assert facts.classifier is not None
    return source, replace(facts, classifier=replace(facts.classifier, appearance=looks.read()))


def batches(images: ImageSet, labels: str, count: int, seed: int) -> Batches:
    """The first batches of a stream."""
    prior = priors.named(labels, len(images.classes))
    stream = Stream(images, prior, batch_size=BATCH, seed=seed, last="drop")
    return [(batch.x, batch.y) for batch, _ in zip(stream, range(count), strict=False)]


def poison(kind: str, images: ImageSet) -> Batches:
    """Batches that nobody should learn from, all with pixels in range."""
    first = Stream(images, batch_size=BATCH, seed=9)
    shape, g = next(iter(first)).x.shape, torch.Generator().manual_seed(0)
    if kind == "black":
        return [(torch.zeros(shape), None)] * POISONED
    if kind == "noise":
        return [(torch.rand(shape, generator=g), None) for _ in range(POISONED)]
    if kind == "repeated":
        one = next(iter(first)).x[:1].expand(shape).contiguous()
        return [(one, None)] * POISONED
    of_class = images.subset(np.flatnonzero(images.labels == CLASS))
    found = [(b.x, None) for b in Stream(of_class, batch_size=BATCH, last="drop")]
    return [found[i % len(found)] for i in range(POISONED)]


def scenarios(images: ImageSet) -> Iterator[tuple[str, Batches, Batches]]:
    """Name, batches before those that count, and those that count."""
    yield SPOILING, [], batches(images, SPOILING, 10**6, 0)
    for name, labels in HEALTHY.items():
        yield name, [], batches(images, labels, BEFORE + AFTER, 1)
    for kind in POISONS:
        before = batches(images, "uniform", BEFORE, 2) + poison(kind, images)
        yield kind, before, batches(images, "uniform", AFTER, 3)


def run(live: Method, facts: Calibration | None, before: Batches, counted: Batches) -> Result:
    """Accuracy of every batch that counts; with a guard if facts are given, also what it did."""
    inside = _Clock(live)
    guard = None if facts is None else Guard(live, facts)
    predict: Callable[[Tensor], Tensor] = live if guard is None else guard
    for x, _ in before:
        predict(x)
    begun, inside.seconds, right = time.thread_time(), 0.0, []
    for x, y in counted:
        assert y is not None
        right.append(float((predict(x).argmax(1) == y).float().mean()))
    result: Result = {"accuracy": right}
    if guard is not None:
        outside = time.thread_time() - begun - inside.seconds
        result["extra_time"] = outside / inside.seconds if inside.seconds else None
        result["switches"] = [switch._asdict() for switch in guard.switches]
    return result


class _Clock:
    """The processor time that a method takes by itself."""

    def __init__(self, method: Method) -> None:
        self.seconds, predict = 0.0, method.forward

        def timed(x: Tensor) -> Tensor:
            begun = time.thread_time()
            try:
                return predict(x)
            finally:
                self.seconds += time.thread_time() - begun

        method.forward = timed  # type: ignore[method-assign]


def measure_all(data: Path, file: Path = FILE, only: Callable[[str], bool] | None = None) -> None:
    """Measure what is not yet in the file, which is written after every stream."""
    begun = time.monotonic()
    revision()  # of the code that measures, should it change meanwhile
    record: dict[str, Any] = {"results": {}}
    if file.exists():
        record = json.loads(file.read_text())
    earlier = record.get("facts", {}).get("seconds", 0.0)
    test = load("cifar10", "test", data)
    for corruption in CORRUPTIONS:
        images = corrupted(test, corruption, SEVERITY, root=data)
        for method, (checkpoint, make) in METHODS.items():
            source, facts = known(checkpoint, data)
            for scenario, before, counted in scenarios(images):
                key = f"{method}/{corruption}/{scenario}"
                if key in record["results"] or (only is not None and not only(key)):
                    continue
                record["results"][key] = {
                    "alone": run(make(source, facts), None, before, counted),
                    "guarded": run(make(source, facts), facts, before, counted),
                }
                seconds = earlier + time.monotonic() - begun
                record["facts"] = run_facts(test, torch.device("cpu"), seconds)
                write_json(file, record)


def mean_of(record: Mapping[str, Any], method: str, scenario: str, how: str, most: int) -> float:
    """Accuracy in % over the first batches that count, mean over corruptions."""
    found = [record["results"][f"{method}/{c}/{scenario}"][how] for c in CORRUPTIONS]
    return 100 * float(np.mean([np.mean(entry["accuracy"][:most]) for entry in found]))


def paragraph(record: Mapping[str, Any]) -> str:
    """The results as tables and sentences."""
    streams = (SPOILING, *POISONS, *HEALTHY)
    rows = []
    for method in METHODS:
        for how, title in (("alone", method), ("guarded", f"{method}, guarded")):
            values = [mean_of(record, method, s, how, AFTER + BEFORE) for s in streams]
            rows.append([title, *(f"{value:.1f}" for value in values)])
    soon = []
    for method in METHODS:
        for how, title in (("alone", method), ("guarded", f"{method}, guarded")):
            values = [mean_of(record, method, s, how, SOON) for s in POISONS]
            soon.append([title, *(f"{value:.1f}" for value in values)])
    intro = (
        f"Accuracy in %, mean over {' and '.join(c.replace('_', ' ') for c in CORRUPTIONS)} at "
        f"severity {SEVERITY}, one seed. *{SPOILING}* is a stream of few classes; *black*, "
        f"*noise*, *one class* and *repeated* are the {AFTER} healthy batches after {POISONED} "
        f"batches of poison; *U*, *F50* and *B50* are healthy streams:"
    )
    early = f"The first {SOON} batches after the poison:"
    return "\n\n".join(
        [
            markdown.paragraph(intro),
            markdown.table(["", *streams], rows).rstrip(),
            early,
            markdown.table(["", *POISONS], soon).rstrip(),
            markdown.paragraph(_verdict(record)),
        ]
    )


def _verdict(record: Mapping[str, Any]) -> str:
    costs, extra, falls = [], [], 0
    for method in METHODS:
        times = []
        for corruption in CORRUPTIONS:
            for name in HEALTHY:
                entry = record["results"][f"{method}/{corruption}/{name}"]
                means = [np.mean(entry[how]["accuracy"]) for how in ("alone", "guarded")]
                costs.append(100 * float(means[0] - means[1]))
                if entry["guarded"]["switches"]:
                    falls += 1
                else:
                    times.append(100 * entry["guarded"]["extra_time"])
        extra.append(f"{np.median(times):.1f} for {method}" if times else f"unknown for {method}")
    spoilt = [mean_of(record, "TENT", SPOILING, how, 10**6) for how in ("alone", "guarded")]
    found = [record["results"][f"TENT/{c}/{SPOILING}"]["guarded"]["switches"] for c in CORRUPTIONS]
    when = [str(switches[0]["images"]) if switches else "none" for switches in found]
    return (
        f"On {len(costs)} healthy streams, the guard costs {np.mean(costs):.2f} points on average "
        f"and {max(costs):.2f} at most (target: less than 0.5); it fell back in {falls} of them. "
        f"Where it did not, it took so many % more processor time (medians; target: less than 3): "
        f"{', '.join(extra)}. "
        f"TENT on {SPOILING}: {spoilt[0]:.1f} % alone, {spoilt[1]:.1f} % guarded; images until "
        f"it fell back: {' and '.join(when)}. "
        f"Revision {record['facts']['revision']}; measured by `make guard-results`."
    )


def insert(page: str, record: Mapping[str, Any]) -> str:
    """The page with the tables between its marks."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n\n{paragraph(record)}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default="data", help="folder of the data sets")
    measure_all(parser.parse_args().data)


if __name__ == "__main__":
    main()
