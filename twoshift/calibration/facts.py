"""The facts of a source model, one function each, and the rule by which they are handed out.

A fact is named after its function. A method, estimator or adapter that has a parameter of that name
gets it. What the function takes decides when the fact is known:

- the card of the source model: always;
- predictions for source images that the predicting model was not trained on: after a calibration,
  once for each kind of normalisation statistics, since a model errs differently under each;
- the model and its training images: after a calibration;
- windows of predictions for images that were corrupted and drawn with other labels: after a
  calibration that simulated them;
- the model and labelled images, from a training that takes minutes: after a calibration that was
  asked for it by name.

A fact is a number, a tensor, or tensors by name; None means that the model has no such fact. One
that runs the model may raise ModelError instead. A new fact is one more function here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from twoshift.accuracy.fits import Windows, fit_accuracy
from twoshift.calibration._windows import draw_windows, label_shares
from twoshift.calibration.dart import fit_dart
from twoshift.data.base import ImageSet
from twoshift.data.stream import batch_edges
from twoshift.errors import BatchError, SettingError
from twoshift.estimators._bcts import class_shares, fit_bcts
from twoshift.estimators.readout import fit_readout
from twoshift.methods.eata import fisher_information
from twoshift.methods.matched import class_moments
from twoshift.registry import check_choice, parameters_of
from twoshift.train import reading
from twoshift.train.checkpoint import SourceCard

F = TypeVar("F", bound=Callable[..., Any])
Value = float | Tensor | dict[str, Tensor] | None
BATCH = 64
FISHER_IMAGES = 2000  # as EATA's authors
QUANTILE, MARGIN = 0.05, 0.05  # the rule of CoTTA's authors


class Predictions:
    """What a model predicts for source images whose labels are known.

    Args:
        logits: Raw outputs of the model, (N, classes), for images it was not trained on.
        labels: Their true classes, (N,); every class must occur.
        windows: Mean probabilities and label shares of label-shifted windows, both
            (windows, classes). Give them where a prediction depends on the rest of its batch;
            otherwise windows are drawn from ``logits``.
    """

    def __init__(
        self, logits: Tensor, labels: Tensor, windows: tuple[Tensor, Tensor] | None = None
    ) -> None:
        if logits.ndim != 2 or labels.shape != logits.shape[:1] or not len(labels):
            raise BatchError(
                "logits and labels to calibrate on",
                must_be="(N, classes) and (N,)",
                got=f"{tuple(logits.shape)} and {tuple(labels.shape)}",
            )
        if not logits.isfinite().all():
            raise BatchError("logits to calibrate on", must_be="finite", got="NaN or infinity")
        self.classes = logits.shape[1]
        class_shares(labels.cpu().numpy(), self.classes)  # refuses a set that lacks a class
        shapes = [tuple(part.shape) for part in windows or ()]
        if windows is not None and shapes != [(len(windows[0]), self.classes)] * 2:
            must_be = f"means and shares, both (windows, {self.classes})"
            raise BatchError("windows to calibrate on", must_be=must_be, got=shapes)
        self.logits, self.labels = logits.detach().cpu().double(), labels.cpu().long()
        self.probs = self.logits.softmax(1)
        self._windows = windows

    @cached_property
    def bcts(self) -> tuple[float, Tensor]:
        """Temperature and bias, which are fitted together."""
        return fit_bcts(self.logits, self.labels)

    @cached_property
    def windows(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean probabilities and label shares of label-shifted windows."""
        if self._windows is not None:
            means, shares = (part.detach().cpu().double().numpy() for part in self._windows)
            return means, shares
        labels = self.labels.numpy()
        windows = draw_windows(labels, self.classes, rng=np.random.default_rng(0))
        means = np.stack([self.probs[torch.from_numpy(rows)].mean(0).numpy() for rows in windows])
        return means, np.stack([label_shares(labels[rows], self.classes) for rows in windows])


class Shifted(NamedTuple):
    """Simulated windows, and the confidence above which an image counted as sure in them."""

    windows: Windows
    threshold: float


FROM_CARD: dict[str, Callable[[SourceCard], Any]] = {}
FROM_PREDICTIONS: dict[str, Callable[[Predictions], Value]] = {}
FROM_IMAGES: dict[str, Callable[[nn.Module, ImageSet], Value]] = {}
FROM_SHIFTS: dict[str, Callable[[Shifted], Value]] = {}
ON_DEMAND: dict[str, Callable[[nn.Module, Any, Callable[[int, int], None]], Value]] = {}


def fact(table: dict[str, Any]) -> Callable[[F], F]:
    """Decorator: make a function a fact, under its own name."""

    def register(function: F) -> F:
        name = function.__name__
        if name in fact_names():
            raise ValueError(f"fact {name!r} is defined twice")
        table[name] = function
        return function

    return register


def fact_names() -> set[str]:
    """Names of all facts."""
    return {*FROM_CARD, *FROM_PREDICTIONS, *FROM_IMAGES, *FROM_SHIFTS, *ON_DEMAND}


@fact(FROM_CARD)
def class_counts(card: SourceCard) -> list[int]:
    """Training images of every class."""
    return list(card.class_counts)


@fact(FROM_CARD)
def source_prior(card: SourceCard) -> list[float]:
    """Label distribution of the training images."""
    return card.prior.tolist()


@fact(FROM_CARD)
def assumes(card: SourceCard) -> list[float] | None:
    """The label distribution that the logits contain; None where the training took it out."""
    return card.prior.tolist() if card.strategy == "cross_entropy" else None


@fact(FROM_PREDICTIONS)
def temperature(predictions: Predictions) -> float:
    """T of the calibrated probabilities softmax(logits / T + bias)."""
    return predictions.bcts[0]


@fact(FROM_PREDICTIONS)
def bias(predictions: Predictions) -> Tensor:
    """One number per class, mean 0; with it, the probabilities assume equally frequent classes."""
    return predictions.bcts[1]


@fact(FROM_PREDICTIONS)
def confusion(predictions: Predictions) -> Tensor:
    """Joint distribution of predicted and true class, (predicted, true), by raw probabilities."""
    sums = torch.zeros(predictions.classes, predictions.classes, dtype=torch.float64)
    sums.index_add_(1, predictions.labels, predictions.probs.T)
    return (sums / len(predictions.labels)).float()


@fact(FROM_PREDICTIONS)
def hard_confusion(predictions: Predictions) -> Tensor:
    """The same joint distribution, by the most likely class of every image."""
    classes, labels = predictions.classes, predictions.labels
    pairs = predictions.probs.argmax(1) * classes + labels
    counts = torch.bincount(pairs, minlength=classes**2).double()
    return (counts / len(labels)).float().reshape(classes, classes)


@fact(FROM_PREDICTIONS)
def accuracy(predictions: Predictions) -> float:
    """Share of correct predictions; frequent classes count more."""
    return float(hard_confusion(predictions).trace())


@fact(FROM_PREDICTIONS)
def balanced_accuracy(predictions: Predictions) -> float:
    """Mean recall of the classes."""
    joint = hard_confusion(predictions)
    return float((joint.diagonal() / joint.sum(0)).mean())


@fact(FROM_PREDICTIONS)
def samples(predictions: Predictions) -> int:
    """Number of images behind the confusion matrices."""
    return len(predictions.labels)


@fact(FROM_PREDICTIONS)
def confidence_threshold(predictions: Predictions) -> float:
    """Confidence below which CoTTA averages over augmentations."""
    confidence = predictions.probs.max(1).values
    return max(float(np.quantile(confidence.numpy(), QUANTILE)) - MARGIN, 0.0)


@fact(FROM_PREDICTIONS)
def regression(predictions: Predictions) -> Tensor:
    """Weights of the readout's regression from mean predictions to label distributions."""
    return fit_readout(*predictions.windows)


@fact(FROM_IMAGES)
def fisher(model: nn.Module, images: ImageSet) -> dict[str, Tensor]:
    """EATA's Fisher information of every weight that it trains."""
    rows = shuffled_batches(len(images), FISHER_IMAGES)
    return fisher_information(model, reading.tensors(images.images, rows))


@fact(FROM_IMAGES)
def moments(model: nn.Module, images: ImageSet) -> dict[str, Tensor]:
    """Mean and variance of each channel, class by class, before every batch normalisation."""
    parts = reading.in_parts(len(images), images.images)
    labels = [torch.from_numpy(images.labels[rows]) for rows in parts]
    return class_moments(model, zip(reading.tensors(images.images, parts), labels, strict=True))


@fact(FROM_SHIFTS)
def accuracy_judge(shifted: Shifted) -> Tensor:
    """How often predictions are right; see `ExpectedAccuracy`."""
    return fit_accuracy(*shifted)


@fact(ON_DEMAND)
def dart(model: nn.Module, images: Any, progress: Callable[[int, int], None]) -> dict[str, Tensor]:
    """DART's network, which refines predictions; see `fit_dart`."""
    return fit_dart(model, images, progress=progress)


def check_demands(also: Collection[str]) -> list[str]:
    """Names of facts that are computed on demand, or why they cannot be."""
    wanted = [also] if isinstance(also, str) else list(also)
    for name in wanted:
        check_choice("a calibration", ON_DEMAND, also=name)
    return wanted


def shuffled_batches(count: int, most: int) -> list[NDArray[np.int64]]:
    """Rows of ``most`` random images out of ``count``, in batches; the same ones every time."""
    order = np.random.default_rng(0).permutation(count)
    edges = batch_edges(min(count, most), BATCH, "merge")
    return [order[a:b] for a, b in itertools.pairwise(edges)]


def hand_out(
    facts: Mapping[str, Any],
    entry: Callable[..., Any],
    chosen: Mapping[str, Any] | None = None,
    *,
    calibrated: bool = False,
) -> dict[str, Any]:
    """Arguments of a method, estimator or adapter: its chosen settings, and the facts it names.

    ``EM(10, **hand_out(facts, EM))``. Arguments that are neither are left to the caller.

    Args:
        facts: Facts by name; None for one that the model does not have.
        entry: The class.
        chosen: Settings that were chosen; one of them goes before a fact of the same name.
        calibrated: Accept no default in place of a fact of predictions.

    Raises:
        SettingError: A fact that it needs is not known.
    """
    arguments = dict(chosen or {})
    for name, parameter in parameters_of(entry).items():
        if name in arguments or name not in fact_names():
            continue
        if facts.get(name) is not None:
            arguments[name] = facts[name]
        elif parameter.default is parameter.empty or (calibrated and name in FROM_PREDICTIONS):
            also = f" --also {name}" if name in ON_DEMAND else ""
            calibrate = f"Calibrate the model: twoshift calibrate --source DIR{also}. Or pass"
            raise SettingError(
                f"{name!r} of the source model, which {entry.__name__} needs",
                must_be="known",
                cure=f"{'Pass' if name in FROM_CARD else calibrate} {name}=...",
            )
    return arguments
