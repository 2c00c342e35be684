"""The facts of a source model, a function each, and the one rule by which they are handed out.

A fact is named after its function. A method, estimator or adapter that has a parameter of that name
gets it. What a fact is computed from is what its function takes:

- the card of the source model: known without any calibration;
- predictions on source images that the predicting model had not seen, for either kind of
  normalisation statistics, since a model errs differently under each;
- the model and its training images.

The docstring of a fact says what it is; returning None, or raising ModelError, means that the model
has no such fact. A new fact is one more function here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from twoshift.calibration._windows import draw_windows, label_shares
from twoshift.data.base import ImageSet
from twoshift.data.stream import batch_edges
from twoshift.errors import BatchError, SettingError
from twoshift.estimators._bcts import class_shares, fit_bcts
from twoshift.estimators.readout import fit_readout
from twoshift.methods.eata import fisher_information
from twoshift.methods.matched import class_moments
from twoshift.registry import parameters_of
from twoshift.train import reading
from twoshift.train.checkpoint import SourceCard

F = TypeVar("F", bound=Callable[..., Any])
Value = float | Tensor | dict[str, Tensor]
BATCH = 64
FISHER_IMAGES = 2000  # as EATA's authors
QUANTILE, MARGIN = 0.05, 0.05  # the rule of CoTTA's authors
CURE = "twoshift calibrate --source DIR"


class Predictions:
    """What a model predicts for source images whose labels are known.

    Args:
        logits: Raw outputs of the model, (N, classes), on images it was not trained on.
        labels: Their true classes, (N,); every class must occur.
        windows: Mean probabilities and label shares of label-shifted windows, both
            (windows, classes), where they depend on who else is in a batch; otherwise windows are
            drawn from ``logits``.
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
        self.logits, self.labels = logits.detach().cpu().double(), labels.detach().cpu()
        class_shares(self.labels.numpy(), logits.shape[1])  # refuses classes that are absent
        self.probs = self.logits.softmax(1)
        self._windows = windows

    @cached_property
    def bcts(self) -> tuple[float, list[float]]:
        """Temperature and bias, which are fitted together."""
        return fit_bcts(self.logits, self.labels)

    @cached_property
    def windows(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean probabilities and label shares of label-shifted windows."""
        if self._windows is not None:
            means, shares = self._windows
            return means.double().numpy(), shares.double().numpy()
        y, classes = self.labels.numpy(), self.logits.shape[1]
        windows = draw_windows(y, classes, rng=np.random.default_rng(0))
        means = torch.stack([self.probs[torch.from_numpy(rows)].mean(0) for rows in windows])
        return means.numpy(), np.stack([label_shares(y[rows], classes) for rows in windows])

    def joint(self, predicted: Tensor) -> Tensor:
        """Joint distribution of predicted and true class, from one distribution per image."""
        truth = torch.eye(predicted.shape[1], dtype=torch.float64)[self.labels]
        return (predicted.T @ truth / len(self.labels)).float()


FROM_CARD: dict[str, Callable[..., Any]] = {}  # of a SourceCard
FROM_PREDICTIONS: dict[str, Callable[..., Value]] = {}  # of Predictions
FROM_IMAGES: dict[str, Callable[..., Value]] = {}  # of a model and an ImageSet


def _fact(room: dict[str, Any]) -> Callable[[F], F]:
    """Decorator: make a fact of a function, under its name."""

    def keep(function: F) -> F:
        room[function.__name__] = function
        return function

    return keep


@_fact(FROM_CARD)
def source_prior(card: SourceCard) -> list[float]:
    """Label distribution of the training images."""
    return card.prior.tolist()


@_fact(FROM_CARD)
def assumes(card: SourceCard) -> list[float] | None:
    """The label distribution that the logits contain; None where the training took it out."""
    return card.prior.tolist() if card.strategy == "cross_entropy" else None


@_fact(FROM_PREDICTIONS)
def temperature(predictions: Predictions) -> float:
    """T of the calibrated probabilities softmax(logits / T + bias)."""
    return predictions.bcts[0]


@_fact(FROM_PREDICTIONS)
def bias(predictions: Predictions) -> Tensor:
    """One per class, mean 0; it makes the probabilities those of equally frequent classes."""
    return torch.tensor(predictions.bcts[1], dtype=torch.float64)


@_fact(FROM_PREDICTIONS)
def confusion(predictions: Predictions) -> Tensor:
    """Joint confusion matrix, (predicted, true), sum 1, of the raw probabilities."""
    return predictions.joint(predictions.probs)


@_fact(FROM_PREDICTIONS)
def hard_confusion(predictions: Predictions) -> Tensor:
    """The same matrix of the most likely classes."""
    classes = torch.eye(predictions.probs.shape[1], dtype=torch.float64)
    return predictions.joint(classes[predictions.probs.argmax(1)])


@_fact(FROM_PREDICTIONS)
def accuracy(predictions: Predictions) -> float:
    """Share of right predictions; frequent classes count more."""
    return float(hard_confusion(predictions).trace())


@_fact(FROM_PREDICTIONS)
def balanced_accuracy(predictions: Predictions) -> float:
    """Mean recall of the classes."""
    joint = hard_confusion(predictions)
    return float((joint.diagonal() / joint.sum(0)).mean())


@_fact(FROM_PREDICTIONS)
def samples(predictions: Predictions) -> int:
    """Number of images behind the confusion matrices."""
    return len(predictions.labels)


@_fact(FROM_PREDICTIONS)
def confidence_threshold(predictions: Predictions) -> float:
    """Confidence below which CoTTA averages over augmentations."""
    confidence = predictions.probs.max(1).values
    return max(float(np.quantile(confidence.numpy(), QUANTILE)) - MARGIN, 0.0)


@_fact(FROM_PREDICTIONS)
def regression(predictions: Predictions) -> Tensor:
    """Weights of the readout's regression from mean predictions to label distributions."""
    return fit_readout(*predictions.windows)


@_fact(FROM_IMAGES)
def fisher(model: nn.Module, images: ImageSet) -> dict[str, Tensor]:
    """EATA's Fisher information of every weight that it trains."""
    rows = shuffled_batches(len(images), FISHER_IMAGES)
    return fisher_information(model, reading.tensors(images.images, rows))


@_fact(FROM_IMAGES)
def moments(model: nn.Module, images: ImageSet) -> dict[str, Tensor]:
    """Mean and variance of each channel, class by class, before every batch normalisation."""
    parts = reading.in_parts(len(images), images.images)
    labels = [torch.from_numpy(images.labels[rows]) for rows in parts]
    return class_moments(model, zip(reading.tensors(images.images, parts), labels, strict=True))


NAMES = frozenset({*FROM_CARD, *FROM_PREDICTIONS, *FROM_IMAGES})


def shuffled_batches(count: int, most: int) -> list[NDArray[np.int64]]:
    """Rows of ``most`` random images out of ``count``, in batches; the same ones every time."""
    order = np.random.default_rng(0).permutation(count)
    edges = batch_edges(min(count, most), BATCH, "merge")
    return [order[a:b] for a, b in itertools.pairwise(edges)]


def hand_out(
    facts: Mapping[str, Any], owner: str, entry: Callable[..., Any], chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of a method, estimator or adapter: the facts it names, and its chosen settings.

    Args:
        facts: Facts by name; None for what is not known.
        owner: What it is called in an error.
        entry: The class.
        chosen: Settings that were chosen; they come before facts of the same name.

    Raises:
        SettingError: It cannot do without a fact that is not known.
    """
    arguments = dict(chosen)
    for name, parameter in parameters_of(entry).items():
        if name in arguments or name not in NAMES:
            continue
        if facts.get(name) is not None:
            arguments[name] = facts[name]
        elif parameter.default is parameter.empty:
            raise SettingError(
                f"{owner} needs {name!r} of the source model, which",
                must_be="calibrated",
                cure=CURE,
            )
    return arguments
