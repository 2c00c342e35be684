"""Calibrate any trained classifier on labelled images: all that any part needs, in one call."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from twoshift import priors
from twoshift.adapters import ANSWER
from twoshift.calibration._collect import Collector, labelled
from twoshift.calibration.base import Calibration, calibration_from
from twoshift.calibration.classifier import Classifier, weights_of
from twoshift.calibration.evidence import (
    TRAINING,
    UNIFORM,
    Reading,
    looks_trained_on,
    nearly_equal,
    read_prior,
)
from twoshift.calibration.facts import FROM_SHIFTS, ON_DEMAND, Shifted, check_demands
from twoshift.calibration.shifts import LEAST, Simulation, sure_threshold
from twoshift.data.base import ImageSet
from twoshift.data.stream import Stream
from twoshift.errors import BatchError, DataError, ModelError, SettingError, TwoshiftWarning
from twoshift.methods import Inputs
from twoshift.methods.source import Source
from twoshift.models.classifier import prepare, spec_of
from twoshift.models.head import find_head, trace_head
from twoshift.models.identity import sketch
from twoshift.priors import Prior
from twoshift.registry import check_choice
from twoshift.storage import fingerprint

Batches = Iterable[tuple[Tensor, Tensor]] | ImageSet | Stream
Progress = Callable[[int, int | None], None]
AUTO = "auto"
SUMS_TO_ONE = 1e-3
EQUAL = 1e-6  # difference of two shares that count as equal
TRAINED_ON = (
    "the model looks as if it had been trained on these images: it is nearly always right and "
    "sure, or more often right than it is sure. How far to trust it on new images cannot be told "
    "from such images, so `recommended` will leave its predictions as they are. Pass images that "
    "it was not trained on as held_out=; or these ones, if you know that they are new to it"
)


def calibrate(
    model: nn.Module,
    batches: Batches,
    *,
    held_out: Batches | None = None,
    source_prior: str | ArrayLike = AUTO,
    class_counts: Sequence[float] | None = None,
    classes: Sequence[str] | None = None,
    head: str | None = None,
    output: str | int | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    simulate: bool = True,
    also: Collection[str] = (),
    progress: Progress | None = None,
) -> Calibration:
    """Find out, once, what the rest of the package must know of a trained classifier.

    Args:
        model: Any trained classifier; it is not changed. It sees the images as they are: either it
            normalises them itself, or ``mean`` and ``std`` are given.
        batches: Pairs of images (B, C, H, W) and labels (B,), a `Stream`, or a set of images, in
            random order; every class must occur. Best are images that the model was not trained on,
            with the label frequencies of its training.
        held_out: The same, of images that the model was certainly not trained on. Its confidence
            and its mistakes are then taken from these, and the statistics of every class from
            ``batches``.
        source_prior: The label distribution that the logits contain. ``"auto"`` finds out;
            ``"training"``: that of the training (plain cross-entropy); ``"uniform"``: none, because
            the training balanced the classes; or the distribution itself. A statement that the
            images contradict is an error.
        class_counts: Training images of every class, if ``batches`` have other label frequencies.
        classes: Names of the classes, by class number.
        head: Path of the classifier head; by default it is found by a pass over the first images.
        output: Which entry of the model's output holds the logits: a key, attribute or position.
        mean: Subtracted from the images before the model sees them, per channel.
        std: The images are divided by it after that, per channel.
        simulate: Whether to corrupt some of the images and to draw them with other labels, to learn
            how far to trust the model then: about 80,000 predictions. It needs pictures with one or
            three channels, pixels from 0 to 1, that are new to the model; without, there is no
            ``expected_accuracy``, and `recommended` is more careful.
        also: Facts to compute that take minutes and that only the method of that name needs:
            ``["dart"]``. They read ``batches`` once more.
        progress: Called after each batch with the number of images so far and that of all, where it
            is known, and then after each simulated stream with their numbers, and after each epoch
            of what is trained; by default, bars on a terminal.
    """
    demanded = check_demands(also)
    if demanded and isinstance(batches, Iterator):
        raise SettingError(
            f"batches of calibrate with also={demanded}",
            must_be="readable twice",
            got="an iterator",
            cure="Pass a list, a DataLoader, a Stream or a set of images.",
        )
    net = prepare(model, output=output, mean=mean, std=std).eval()
    unstated = isinstance(source_prior, str) and source_prior == AUTO and class_counts is None
    if unstated and isinstance(batches, ImageSet | Stream):  # before the work, where that is known
        _ask_about_equal_labels(np.unique(batches.labels, return_counts=True)[1])
    seen, head = _look(net, batches, head, progress)
    judged = seen
    if held_out is not None:
        judged, _ = _look(net, held_out, head, progress, training=False)
    trained_on = _training_labels(seen, class_counts, source_prior)
    logits, labels = judged.running.read()
    _check_logits(net, logits)
    reading = read_prior(logits, labels, trained_on)
    contained = _contained(reading, source_prior, trained_on)
    running = calibration_from(logits, labels)
    honest = held_out is not None or not looks_trained_on(
        logits, labels, running["temperature"], running["bias"]
    )
    batch = _under_batch_statistics(judged)
    if not honest:
        running, batch = (_no_surer(facts, contained) for facts in (running, batch))
        warnings.warn(TRAINED_ON, TwoshiftWarning, stacklevel=2)
    moments = seen.moments()
    shifted = None
    if simulate and honest:
        known = {**running, "assumes": contained, "moments": moments}
        shifted = _shifted(net, judged, known, progress)
    learnt = {name: shifted and fit(shifted) for name, fit in FROM_SHIFTS.items()}
    for name in demanded:
        with _bar(name) as bar:
            learnt[name] = ON_DEMAND[name](net, batches, progress or bar)
    weights = weights_of(net)
    digest = fingerprint(weights)
    return Calibration(
        running=running,
        batch=batch,
        held_out=honest,
        folds=0,
        source=digest,
        facts={
            "class_counts": torch.tensor(_counts(seen, class_counts), dtype=torch.float64),
            "source_prior": torch.from_numpy(trained_on),
            "assumes": None if contained is None else torch.from_numpy(contained),
            "moments": moments,
            "fisher": seen.fisher(),
            **learnt,
        },
        classifier=Classifier(
            weights=digest,
            sketch=sketch(weights),
            head=head,
            prepared=spec_of(net),
            inputs=_inputs(seen),
            appearance=seen.looks.read(),
            classes=_names(classes, batches, len(seen.counts)),
            images=judged.images,
            reading=reading,
        ),
    )


def _look(
    net: nn.Module,
    batches: Batches,
    head: str | None,
    progress: Progress | None,
    training: bool = True,
) -> tuple[Collector, str]:
    """Run the classifier on all batches; the head is found on the first one."""
    stream = labelled(batches)
    first = next(stream, None)
    if first is None:
        raise BatchError("batches to calibrate on", must_be="at least one", got="none")
    answer = Source(net)(first[0])  # refuses images that the model cannot take
    if head is None:
        head = trace_head(net, first[0]) or ANSWER
    elif head != ANSWER:
        find_head(net, head)
    seen = Collector(net, answer.shape[1], training)
    total = None if isinstance(batches, Iterator) else _images_in(batches)
    with _bar("calibrate") as bar:
        report = progress or bar
        for x, labels in itertools.chain([first], stream):
            seen.add(x, labels)
            report(seen.images, total)
    if absent := [c for c, n in enumerate(seen.counts.tolist()) if n == 0]:
        raise DataError(
            f"images to calibrate {type(net).__name__} on",
            must_be=f"of all {len(seen.counts)} classes",
            got=f"none of class {absent[0]}" + (f" and {len(absent) - 1} more" * (len(absent) > 1)),
        )
    return seen, head


def _counts(seen: Collector, class_counts: Sequence[float] | None) -> list[float]:
    """Training images of every class, as stated or as seen."""
    counts = seen.counts.tolist() if class_counts is None else [float(n) for n in class_counts]
    if len(counts) != len(seen.counts):
        must_be = f"{len(seen.counts)} numbers, one for each class"
        raise SettingError("class_counts", must_be=must_be, got=f"{len(counts)}")
    if not np.isfinite(counts).all() or min(counts) < 0 or not any(counts):
        must_be = "numbers of images, not all zero"
        raise SettingError("class_counts", must_be=must_be, got=counts)
    return counts


def _training_labels(
    seen: Collector, class_counts: Sequence[float] | None, source_prior: str | ArrayLike
) -> Prior:
    """Label distribution of the training."""
    if not isinstance(source_prior, str):
        what = "source_prior of calibrate"
        return priors.check_prior(source_prior, len(seen.counts), what)
    check_choice("calibrate", (AUTO, TRAINING, UNIFORM), source_prior=source_prior)
    counts = np.asarray(_counts(seen, class_counts))
    if source_prior == AUTO and class_counts is None:
        _ask_about_equal_labels(counts)
    return priors.check_prior(counts / counts.sum(), len(counts), "class_counts of calibrate")


def _ask_about_equal_labels(counts: NDArray[np.int64]) -> None:
    if nearly_equal(counts):
        raise SettingError(
            "these images have equally frequent labels, so they cannot tell whether the model's "
            "logits contain the label distribution of its training",
            cure="Pass class_counts=, the number of training images of every class; or, if the "
            "training balanced the classes or had equally many of each, source_prior='uniform'.",
        )


def _contained(reading: Reading, source_prior: str | ArrayLike, trained_on: Prior) -> Prior | None:
    """The label distribution that the logits contain; None for none."""
    if np.ptp(trained_on) < EQUAL:
        return None  # a uniform one changes nothing
    stated = source_prior if isinstance(source_prior, str) else TRAINING
    if stated == AUTO and not reading.sure:
        message = (
            "whether the logits contain the label distribution of the training is not clear: "
            f"{reading}. Taken for source_prior={reading.contains!r}; state it if you know better."
        )
        warnings.warn(message, TwoshiftWarning, stacklevel=3)
    if stated not in (AUTO, reading.contains) and reading.sure:
        raise SettingError(
            f"source_prior is stated to be {stated!r}, but the images say {reading.contains!r}: "
            f"{reading}",
            cure="Leave source_prior out; or check class_counts, the labels of the training.",
        )
    contains = reading.contains if stated == AUTO else stated
    return trained_on if contains == TRAINING else None


def _under_batch_statistics(judged: Collector) -> dict[str, Any]:
    """The facts of predictions under batch statistics, where shuffled batches had every class."""
    if judged.batch is None or not judged.shuffled:
        return {}
    logits, labels = judged.batch.read()
    if len(labels.unique()) < logits.shape[1]:
        return {}
    return calibration_from(logits, labels)


def _no_surer(facts: dict[str, Any], contained: Prior | None) -> dict[str, Any]:
    """Facts of images that the model was trained on: it is not made surer than it says it is."""
    if not facts:
        return facts
    bias = np.zeros(len(facts["bias"])) if contained is None else -np.log(contained)
    return {
        **facts,
        "temperature": max(1.0, facts["temperature"]),
        "bias": torch.from_numpy(bias - bias.mean()),
    }


def _shifted(
    net: nn.Module, judged: Collector, known: Mapping[str, Any], progress: Progress | None
) -> Shifted | None:
    """Simulated shifts; None where the images cannot be corrupted, or are too few."""
    sample = judged.sample.read()
    if sample is None or len(sample[1]) < LEAST:
        return None
    threshold = sure_threshold(*judged.running.read(), known["temperature"])
    with _bar("simulate") as bar:
        windows = Simulation(net, known, threshold).windows(*sample, progress=progress or bar)
    return Shifted(windows, threshold)


def _check_logits(net: nn.Module, logits: Tensor) -> None:
    """Refuse probabilities."""
    sums_to_one = (logits.double().sum(1) - 1).abs() < SUMS_TO_ONE
    if bool((logits >= 0).all()) and bool(sums_to_one.all()):
        raise ModelError(
            f"{type(net).__name__} returns probabilities",
            must_be="a model that returns logits",
            cure="Leave out the softmax at its end; or, if another entry of its output holds the "
            "logits, name it: output=.",
        )


def _inputs(seen: Collector) -> Inputs:
    shapes = list(seen.shapes)
    channels = {shape[0] for shape in shapes if shape}
    size = shapes[0][1:] if len(shapes) == 1 else ()
    return Inputs(
        channels=channels.pop() if len(channels) == 1 else None,
        size=(size[0], size[1]) if len(size) == 2 else None,
        low=seen.low,
        high=seen.high,
    )


def _names(classes: Sequence[str] | None, batches: Batches, count: int) -> tuple[str, ...] | None:
    """Names of the classes, given or those of the set of images."""
    if classes is None and isinstance(batches, ImageSet):
        classes = batches.classes
    if classes is None:
        return None
    if len(classes) != count:
        raise SettingError("classes", must_be=f"{count} names", got=f"{len(classes)} names")
    return tuple(map(str, classes))


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    """A bar on a terminal, to be called with what is done so far and all there is."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(file=sys.stderr), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _images_in(batches: Any) -> int | None:
    """Number of images, where that is known without reading them."""
    if isinstance(batches, ImageSet):
        return len(batches)
    if isinstance(batches, Stream):
        return len(batches.indices)
    try:
        return len(batches.dataset)  # a DataLoader
    except (AttributeError, TypeError):
        return None
