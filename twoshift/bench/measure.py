"""Running a cell: its method over its stream, and what came of it as a `Result`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from twoshift.adapters import Adapter
from twoshift.bench.build import build
from twoshift.bench.cell import NATURAL, TRAINED, Cell
from twoshift.bench.images import ImageCache
from twoshift.bench.provenance import run_facts
from twoshift.bench.request import check_cell
from twoshift.bench.result import Result, SourceFacts
from twoshift.calibration.base import calibration_folds
from twoshift.data.base import ImageSet
from twoshift.data.schedules import named
from twoshift.data.stream import Stream
from twoshift.errors import MismatchError, SettingError
from twoshift.estimators import EMA
from twoshift.methods import Inputs, Method
from twoshift.metrics import Recorder
from twoshift.priors import class_order
from twoshift.train.checkpoint import SourceModel

Images = ImageSet | Sequence[ImageSet]


def evaluate(
    method: Method,
    stream: Stream,
    class_counts: list[int],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Recorder:
    """Run a method over a stream; only the recorder sees labels.

    The predictions of a method without an estimator are averaged here, unknown to the method, so
    that every result has a label estimate.
    """
    recorder = Recorder(class_counts)
    average = EMA(len(class_counts))
    for batch in stream:
        start = time.perf_counter()
        logits = method(batch.x)
        seconds = time.perf_counter() - start
        estimate = getattr(method, "prior", None)
        if estimate is None:
            average.update(logits.softmax(1))
            estimate = average.prior
        recorder.update(logits, batch.y, estimate, seconds)
        progress(batch.step + 1, len(stream))
    return recorder


def prepare(
    cell: Cell, source: SourceModel, adapter: Adapter | None, images: Images | ImageCache
) -> tuple[Method, Stream]:
    """The method and the stream of a cell.

    Args:
        cell: The cell.
        source: The source model.
        adapter: The trained adapter, where the cell uses one.
        images: The test images, already corrupted, or a cache to get them from. Of corruptions that
            follow one another, the images under each.

    Raises:
        MismatchError: The adapter was trained for another source model.
    """
    check_cell(cell)
    if cell.adapter == TRAINED and adapter is not None:
        check_match(adapter, source)
    if isinstance(images, ImageCache):
        images = images.of(cell, source)
    stream = stream_of(cell, images, source.card.class_counts)
    height, width, channels = stream.data.images.shape[1:]
    facts = Inputs(channels, (height, width))
    return build(cell, source, adapter, stream).expect(facts), stream


def check_match(adapter: Adapter, source: SourceModel) -> None:
    """Refuse an adapter that was trained for other weights than those of the source model."""
    if adapter.trained_for not in (None, source.weights):
        raise MismatchError(
            "the adapter was trained for other source weights: they",
            must_be=source.weights[:12],
            got=str(adapter.trained_for)[:12],
            cure="Train one for this source: twoshift train adapter --source DIR --out DIR.",
        )


def run_cell(
    cell: Cell,
    source: SourceModel,
    adapter: Adapter | None = None,
    *,
    data: str | Path | None = None,
    images: Images | ImageCache | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
    """Measure a cell.

    Args:
        cell: What to measure.
        source: The source model.
        adapter: The trained adapter, where the cell uses one.
        data: Root of the data sets.
        images: The test images, already corrupted, or a cache of them for several cells; by
            default they are loaded from ``data``.
        progress: Called after every batch.
    """
    started = time.perf_counter()
    if images is None:
        images = ImageCache(data)
    method, stream = prepare(cell, source, adapter, images)
    recorder = evaluate(method, stream, source.card.class_counts, progress)
    trace = recorder.trace()
    # six digits are enough: with many classes, estimates are most of a record
    trace["prior"] = [[round(p, 6) for p in prior] for prior in trace["prior"]]
    return Result(
        key=cell.key,
        cell=cell,
        source=source_facts(source),
        adapter=adapter.fingerprint() if adapter and cell.adapter == TRAINED else None,
        metrics=recorder.summary(),
        facts=run_facts(stream.data, method.device, time.perf_counter() - started),
        trace={**trace, "true_prior": stream.prior.tolist()},
    )


def source_facts(source: SourceModel) -> SourceFacts:
    """What a result says about its source model."""
    card = source.card
    return SourceFacts(
        dataset=card.dataset,
        architecture=card.architecture,
        norm=card.settings.get("norm"),
        width=card.settings.get("width"),
        strategy=card.strategy,
        seed=card.seed,
        weights=source.weights,
        calibration_folds=calibration_folds(source),
    )


def stream_of(cell: Cell, images: Images, class_counts: list[int]) -> Stream:
    """The stream of a cell; forward and backward refer to the class counts of the source."""
    parts = 1 if isinstance(images, ImageSet) else len(images)
    if parts != len(cell.corruptions):
        must_be = f"{len(cell.corruptions)}, one per corruption"
        raise SettingError("image sets of a cell", must_be=must_be, got=parts)
    prior = None
    if cell.labels != NATURAL:
        order = list(class_order(class_counts))
        prior = named(cell.labels, len(class_counts), order=order, seed=cell.seed)
    return Stream(
        images,
        prior,
        batch_size=cell.batch_size,
        seed=cell.seed,
        images=cell.images,
        order=cell.order,
    )
