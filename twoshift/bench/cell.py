"""A cell: everything that decides a number. Running it gives that number and how it came about."""

from __future__ import annotations

import hashlib
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from twoshift import __version__, estimators, methods, priors
from twoshift.adapters import Adapter
from twoshift.calibration import calibration_of
from twoshift.data import load
from twoshift.data.base import ImageSet
from twoshift.data.corrupted import corrupted
from twoshift.data.corruptions import corruptions
from twoshift.data.files import drop_bad
from twoshift.data.stream import Stream
from twoshift.estimators import EMA
from twoshift.methods import Method
from twoshift.metrics import Recorder
from twoshift.registry import signature_settings
from twoshift.train.checkpoint import SourceModel

IDENTITY, LOGIT, CALIBRATED = UNTRAINED = ("identity", "logit", "calibrated")
TRAINED, CLEAN = "trained", "clean"
NATURAL = "natural"  # labels as the data set has them: for sets with a label shift of their own
PROTOCOL = 1  # how numbers are measured; a change that moves them makes other keys


@dataclass(frozen=True)
class Model:
    """A source model and its adapter, by recipe: known before either is trained.

    Attributes:
        source: All settings of the source recipe.
        adapter: All settings of the adapter recipe; None where no adapter is trained.
        seed: Seed of both trainings.
    """

    source: dict[str, Any]
    adapter: dict[str, Any] | None = None
    seed: int = 0

    @property
    def source_key(self) -> str:
        """Names the source model."""
        return digest([self.source, self.seed])

    @property
    def adapter_key(self) -> str:
        """Names the adapter, which belongs to one source model."""
        return digest([self.source, self.adapter, self.seed])


@dataclass(frozen=True)
class Cell:
    """One method on one stream.

    Attributes:
        model: Whose weights; None where the caller brings them.
        target: The data set whose test images are the stream; by default the source's.
        method: Registered name.
        settings: Settings of the method; the others have their defaults.
        adapter: ``None``, ``"identity"`` (the control: attached, but changes nothing), ``"logit"``
            (adds the logarithm of the estimate), ``"calibrated"`` (adds it to calibrated logits) or
            ``"trained"``.
        estimator: What tells the adapter, or logit adjustment, the label distribution; ignored by
            methods without either.
        estimator_settings: Its settings; the oracle's prior comes from the stream.
        corruption: Registered corruption, or ``"clean"``.
        severity: 1 to 5.
        labels: Name of the label distribution; ``"natural"`` takes all images as they are.
        seed: Of the stream: which images, in which order; of a random distribution, too.
        batch_size: Images per batch.
        order: ``"shuffled"`` or ``"correlated"``.
    """

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    estimator: str = "ema"
    estimator_settings: dict[str, Any] = field(default_factory=dict)
    corruption: str = "clean"
    severity: int = 5
    labels: str = "uniform"
    seed: int = 0
    batch_size: int = 64
    order: str = "shuffled"
    model: Model | None = None
    target: str | None = None

    @property
    def key(self) -> str:
        """Hash of everything that decides the number, defaults of the method included.

        Neither data nor weights are needed for it.
        """
        chosen = {**signature_settings(methods.methods[self.method]), **self.settings}
        told: list[Any] | None = None
        if self.adapter is not None:
            defaults = signature_settings(estimators.estimators[self.estimator])
            told = [self.estimator, {**defaults, **self.estimator_settings}]
        model = self.model and {**vars(self.model)}  # not asdict, which copies every leaf
        if model and self.adapter != TRAINED:
            model["adapter"] = None  # it is not used
        content = {**vars(self), "settings": chosen, "model": model, "protocol": PROTOCOL}
        del content["estimator"]
        return digest({**content, "estimator_settings": told})


def digest(content: Any) -> str:
    """Hash of plain data, the same on every machine."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def cell_from(content: dict[str, Any]) -> Cell:
    """A cell from the plain data of a result."""
    model = content.get("model")
    return Cell(**{**content, "model": None if model is None else Model(**model)})


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
) -> dict[str, Any]:
    """Measure a cell.

    Args:
        cell: What to measure.
        source: The source model.
        adapter: The trained adapter, where the cell wants one.
        data: Root of the data sets.
        images: The test images, already corrupted, where the caller keeps them.
        progress: Called after every batch.

    Returns:
        ``key``, ``cell``, ``source``, ``adapter`` (a fingerprint), ``metrics``, ``trace`` (per
        batch) and ``facts``, ready for JSON.
    """
    started = time.perf_counter()
    estimators.estimators[cell.estimator]  # names are recorded: they must be right even if unused
    if cell.corruption != CLEAN:
        corruptions[cell.corruption]
    card = source.card
    if images is None:
        images = images_of(cell, source, data)
    stream = stream_of(cell, images, card.class_counts)
    from twoshift.bench.build import build

    method = build(cell, source, adapter, stream)
    calibration = calibration_of(source)
    recorder = evaluate(method, stream, card.class_counts, progress)
    return {
        "key": cell.key,
        "cell": asdict(cell),
        "source": {
            "dataset": card.dataset,
            "architecture": card.architecture,
            "norm": card.settings.get("norm"),
            "width": card.settings.get("width"),
            "strategy": card.strategy,
            "seed": card.seed,
            "weights": source.weights,
            "calibration_folds": calibration and calibration.folds,
        },
        "adapter": adapter.fingerprint() if adapter and cell.adapter == TRAINED else None,
        "metrics": recorder.summary(),
        "trace": {**_slim(recorder.trace()), "true_prior": stream.prior.tolist()},
        "facts": run_facts(images, method.device, time.perf_counter() - started),
    }


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


def clean_images_of(
    cell: Cell, source: SourceModel, data: str | Path | None = None, *, skip_bad: bool = False
) -> ImageSet:
    """The test images of a cell before the corruption, decoded as those of the training were."""
    decoding = source.card.recipe.get("decoding", {})
    clean = load(cell.target or source.card.dataset, "test", data, **decoding)
    return drop_bad(clean) if skip_bad else clean


def images_of(
    cell: Cell,
    source: SourceModel,
    data: str | Path | None = None,
    *,
    skip_bad: bool = False,
    clean: ImageSet | None = None,
) -> ImageSet:
    """The test images of a cell, corrupted.

    Args:
        cell: Whose.
        source: Its model; images are decoded and classes numbered as in its training.
        data: Root of the data sets.
        skip_bad: Leave images out that cannot be decoded; the set counts them.
        clean: What `clean_images_of` gives, where the caller keeps it.
    """
    if clean is None:
        clean = clean_images_of(cell, source, data, skip_bad=skip_bad)
    images = corrupted(clean, cell.corruption, cell.severity, root=data)
    if skip_bad and images is not clean:  # published files may be bad, too
        images = drop_bad(images)
    return images.aligned(source.card.classes)


def _slim(trace: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Six digits of the estimates: with many classes they are nearly all of a record."""
    return {**trace, "prior": [[round(p, 6) for p in prior] for prior in trace["prior"]]}


def run_facts(images: ImageSet, device: torch.device, seconds: float) -> dict[str, Any]:
    """Where a number comes from: pixels, versions, revision, threads, device, time, memory."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    divisor = 2**20 if sys.platform == "darwin" else 2**10
    return {
        "pixels": images.origin,
        "skipped_images": images.skipped,
        "twoshift": __version__,
        "revision": revision(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "seconds": round(seconds, 3),
        "peak_memory_mb": round(kilobytes / divisor),
    }


@cache
def revision() -> str | None:
    """The commit that the package is run from; None where it is installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
