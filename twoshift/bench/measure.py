"""Running a cell: its method over its stream, and what came of it as a `Result`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twoshift import estimators, priors
from twoshift.adapters import Adapter
from twoshift.bench.build import build
from twoshift.bench.cell import CLEAN, NATURAL, TRAINED, Cell
from twoshift.bench.images import images_of
from twoshift.bench.provenance import run_facts
from twoshift.bench.result import Result, SourceFacts
from twoshift.calibration import calibration_of
from twoshift.data.base import ImageSet
from twoshift.data.corruptions import corruptions
from twoshift.data.stream import Stream
from twoshift.estimators import EMA
from twoshift.methods import Method
from twoshift.metrics import Recorder
from twoshift.train.checkpoint import SourceModel


def evaluate(
    method: Method,
    stream: Stream,
    class_counts: list[int],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Recorder:
    """Run a method over a stream; labels are seen by the recorder only.

    A method without an estimator is watched by a moving average that it knows nothing of, so that
    every row has a label estimate.
    """
    recorder = Recorder(class_counts)
    watcher = EMA(len(class_counts))
    for batch in stream:
        start = time.perf_counter()
        logits = method(batch.x)
        seconds = time.perf_counter() - start
        estimate = getattr(method, "prior", None)
        if estimate is None:
            watcher.update(logits.softmax(1))
            estimate = watcher.prior
        recorder.update(logits, batch.y, estimate, seconds)
        progress(batch.step + 1, len(stream))
    return recorder


def run_cell(
    cell: Cell,
    source: SourceModel,
    adapter: Adapter | None = None,
    *,
    data: str | Path | None = None,
    images: ImageSet | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
    """Measure a cell.

    Args:
        cell: What to measure.
        source: The source model.
        adapter: The trained adapter, where the cell uses one.
        data: Root of the data sets.
        images: The test images, already corrupted, where the caller keeps them.
        progress: Called after every batch.
    """
    started = time.perf_counter()
    estimators.estimators[cell.estimator]  # names are recorded: they must be right even if unused
    if cell.corruption != CLEAN:
        corruptions[cell.corruption]
    class_counts = source.card.class_counts
    if images is None:
        images = images_of(cell, source, data)
    stream = stream_of(cell, images, class_counts)
    method = build(cell, source, adapter, stream)
    recorder = evaluate(method, stream, class_counts, progress)
    return Result(
        key=cell.key,
        cell=cell,
        source=source_facts(source),
        adapter=adapter.fingerprint() if adapter and cell.adapter == TRAINED else None,
        metrics=recorder.summary(),
        facts=run_facts(images, method.device, time.perf_counter() - started),
        trace={**_slim(recorder.trace()), "true_prior": stream.prior.tolist()},
    )


def source_facts(source: SourceModel) -> SourceFacts:
    """What a result says about its source model."""
    card, calibration = source.card, calibration_of(source)
    return SourceFacts(
        dataset=card.dataset,
        architecture=card.architecture,
        norm=card.settings.get("norm"),
        width=card.settings.get("width"),
        strategy=card.strategy,
        seed=card.seed,
        weights=source.weights,
        calibration_folds=None if calibration is None else calibration.folds,
    )


def stream_of(cell: Cell, images: ImageSet, class_counts: list[int]) -> Stream:
    """The stream of a cell; forward and backward are as the source's classes are ordered."""
    prior = None
    if cell.labels != NATURAL:
        order = list(priors.class_order(class_counts))
        prior = priors.named(cell.labels, len(class_counts), order=order, seed=cell.seed)
    return Stream(
        images,
        prior,
        batch_size=cell.batch_size,
        seed=cell.seed,
        order=cell.order,  # type: ignore[arg-type]
    )


def _slim(trace: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Six digits of the estimates: with many classes they are nearly all of a record."""
    return {**trace, "prior": [[round(p, 6) for p in prior] for prior in trace["prior"]]}
