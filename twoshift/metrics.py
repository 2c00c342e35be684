"""Measures of predictions on a stream: functions first, then the recorder that applies them.

Labels, predictions and probabilities may be tensors or arrays; results are plain floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from twoshift.errors import BatchError, InputError
from twoshift.priors import Prior, check_prior, class_order, from_counts

Values = ArrayLike | Tensor
Floats = NDArray[np.float64]

GROUPS = ("head", "medium", "tail")
EDGE = 10  # batches at each end of a stream whose accuracy is also reported on its own
FEW = 10  # with fewer seeds than this, a bootstrap interval is too narrow
FLOOR = 1e-8  # lowest share of a class in an estimate, which keeps the KL divergence finite


def accuracy(predicted: Values, labels: Values) -> float:
    """Share of correct predictions."""
    p, y = _pair(predicted, labels)
    return float((p == y).mean())


def recalls(predicted: Values, labels: Values, classes: int) -> Floats:
    """Recall of every class; NaN for a class that does not occur."""
    p, y = _pair(predicted, labels)
    if not 0 <= y.min() <= y.max() < classes:
        raise InputError("labels", must_be=f"0 to {classes - 1}", got=f"{y.min()} to {y.max()}")
    images = np.bincount(y, minlength=classes)
    correct = np.bincount(y[p == y], minlength=classes)
    return np.divide(correct, images, out=np.full(classes, np.nan), where=images > 0)


def balanced_accuracy(predicted: Values, labels: Values) -> float:
    """Mean recall over the classes that occur."""
    p, y = _pair(predicted, labels)
    return float(np.nanmean(recalls(p, y, int(y.max()) + 1)))


def class_groups(training_counts: ArrayLike) -> dict[str, NDArray[np.int64]]:
    """Head, medium and tail classes: thirds by the number of training images."""
    return dict(zip(GROUPS, np.array_split(class_order(training_counts), 3), strict=True))


def recall_by_group(
    predicted: Values, labels: Values, training_counts: ArrayLike
) -> dict[str, float | None]:
    """Mean recall over the classes of each group that occur; None for a group without any."""
    groups = class_groups(training_counts)
    recall = recalls(predicted, labels, sum(map(len, groups.values())))
    return {
        name: float(np.nanmean(recall[group])) if np.isfinite(recall[group]).any() else None
        for name, group in groups.items()
    }


def ece(probs: Values, labels: Values, bins: int = 15) -> float:
    """Expected calibration error of the top prediction, over bins (low, high] of equal width."""
    p, y = _array(probs), _array(labels)
    if p.ndim != 2 or len(p) != len(y) or not len(y):
        raise InputError("probabilities", must_be="(N, classes) for N labels", got=p.shape)
    return _calibration_error(p.max(1), p.argmax(1) == y, bins)


def _calibration_error(confidence: Floats, correct: NDArray[np.bool_], bins: int) -> float:
    edges = np.linspace(0, 1, bins + 1)
    bin_of = np.searchsorted(edges[1:-1], confidence, side="left")
    gaps = np.bincount(bin_of, weights=correct - confidence.astype(np.float64), minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))


def nll(logits: Values, labels: Values) -> float:
    """Mean negative log-likelihood, from logits: finite even where the softmax is zero."""
    return float(_nll_per_image(torch.as_tensor(logits), torch.as_tensor(labels)).mean())


def _nll_per_image(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.double(), labels.long(), reduction="none")


class PriorDistance(NamedTuple):
    """Distance of a label estimate from the true label distribution."""

    l1: float
    kl: float


def prior_error(estimate: Values, truth: Values) -> PriorDistance:
    """L1 distance, and KL(truth || estimate) with shares of the estimate of at least ``FLOOR``."""
    p = check_prior(_array(truth), whose="true prior")
    q = check_prior(_array(estimate), len(p), "label estimate")
    occurs = p > 0
    kl = (p[occurs] * np.log(p[occurs] / np.maximum(q[occurs], FLOOR))).sum()
    return PriorDistance(float(np.abs(p - q).sum()), float(max(kl, 0.0)))


def imbalance(prior: Values, training_counts: ArrayLike) -> float:
    """Imbalance degree s: +1 if all labels are the head class, -1 if all are the rarest class."""
    order = class_order(training_counts)
    p = check_prior(_array(prior), len(order))
    return float(np.linspace(1, -1, len(order)) @ p[order])


def imbalance_error(estimate: Values, truth: Values, training_counts: ArrayLike) -> float:
    """Signed error of s: positive if the estimate is too much in favour of the head."""
    return imbalance(estimate, training_counts) - imbalance(truth, training_counts)


def bootstrap_interval(
    values: Sequence[float] | Floats, seed: int = 0, level: float = 0.95, draws: int = 10_000
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over seeds."""
    v = np.asarray(values, dtype=np.float64)
    if v.ndim != 1 or len(v) < 2 or not np.isfinite(v).all():
        raise InputError("values of a bootstrap", must_be="two or more finite numbers", got=values)
    if not 0 < level < 1:
        raise InputError("level", must_be="between 0 and 1", got=level)
    means = v[np.random.default_rng(seed).integers(len(v), size=(draws, len(v)))].mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean_interval(values: Sequence[float] | Floats, level: float = 0.95) -> tuple[float, float]:
    """Interval of the mean over seeds: bootstrap, or Student's t for fewer than ten seeds.

    With so few values the percentile bootstrap is little more than their range, which contains the
    true mean far too rarely.
    """
    v = np.asarray(values, dtype=np.float64)
    if len(v) >= FEW:
        return bootstrap_interval(v, level=level)
    bootstrap_interval(v, level=level, draws=1)  # only to check the values
    from scipy import stats

    half_width = stats.t.ppf((1 + level) / 2, len(v) - 1) * v.std(ddof=1) / np.sqrt(len(v))
    return float(v.mean() - half_width), float(v.mean() + half_width)


class Difference(NamedTuple):
    """Mean of a - b over paired runs, and its confidence interval."""

    mean: float
    low: float
    high: float


def paired_difference(
    a: Sequence[float] | Floats, b: Sequence[float] | Floats, level: float = 0.95
) -> Difference:
    """How much better ``a`` is than ``b`` on identical streams."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.shape != y.shape:
        raise InputError("paired values", must_be="equal in number", got=f"{x.shape} and {y.shape}")
    return Difference(float((x - y).mean()), *mean_interval(x - y, level))


@dataclass
class Recorder:
    """Collects the batches of a stream and summarises them.

    Args:
        training_counts: Training images of every class; they define head and tail.
    """

    training_counts: ArrayLike
    _batches: list[_Batch] = field(default_factory=list, init=False, repr=False)

    def update(
        self, logits: Tensor, labels: Tensor, prior: Tensor | None = None, seconds: float = 0.0
    ) -> None:
        """Add a batch.

        Args:
            logits: Logits to be scored, (B, classes).
            labels: True labels, (B,).
            prior: Label estimate at this batch; pass one with every batch or with none.
            seconds: Time that the batch took.
        """
        logits, labels = logits.detach().cpu().double(), labels.detach().cpu().clone()
        expected = (len(labels), len(np.asarray(self.training_counts)))
        if logits.shape != expected or not len(labels):
            raise BatchError("logits", must_be=expected, got=tuple(logits.shape))
        if not logits.isfinite().all():
            raise BatchError(f"logits of batch {len(self._batches)}", must_be="finite")
        if self._batches and (prior is None) != (self._batches[0].prior is None):
            raise InputError("label estimate", must_be="passed with every batch or with none")
        confidence, predicted = logits.softmax(1).max(1)
        nll = _nll_per_image(logits, labels).numpy()
        estimate = None if prior is None else check_prior(_array(prior), expected[1])
        self._batches.append(
            _Batch(labels.numpy(), predicted.numpy(), confidence.numpy(), nll, estimate, seconds)
        )

    def summary(self) -> dict[str, Any]:
        """Measures of the whole stream by name; None for one that cannot be computed."""
        if not self._batches:
            raise InputError("summary", must_be="of at least one batch", got="no batches")
        batches = self._batches
        labels = np.concatenate([b.labels for b in batches])
        predicted = np.concatenate([b.predicted for b in batches])
        confidence = np.concatenate([b.confidence for b in batches])
        groups = recall_by_group(predicted, labels, self.training_counts)
        p50, p95 = np.percentile([1000 * b.seconds for b in batches], [50, 95])
        return {
            "images": len(labels),
            "batches": len(batches),
            "accuracy": accuracy(predicted, labels),
            "balanced_accuracy": balanced_accuracy(predicted, labels),
            **{f"{name}_recall": groups[name] for name in GROUPS},
            "ece": _calibration_error(confidence, predicted == labels, bins=15),
            "nll": float(np.concatenate([b.nll for b in batches]).mean()),
            **self._estimate_errors(labels),
            f"accuracy_first{EDGE}": _accuracy_over(batches[:EDGE]),
            f"accuracy_last{EDGE}": _accuracy_over(batches[-EDGE:]),
            "ms_per_batch_p50": float(p50),
            "ms_per_batch_p95": float(p95),
        }

    def trace(self) -> dict[str, list[Any]]:
        """Accuracy, label estimate and its s for every batch; no estimates make empty lists."""
        estimates = self._estimates()
        return {
            "accuracy": [_accuracy_over([b]) for b in self._batches],
            "prior": [e.tolist() for e in estimates],
            "s": [imbalance(e, self.training_counts) for e in estimates],
        }

    def _estimates(self) -> list[Prior]:
        return [b.prior for b in self._batches if b.prior is not None]

    def _estimate_errors(self, labels: NDArray[np.int64]) -> dict[str, float | None]:
        names = ("prior_l1", "prior_kl", "s_error_final")
        means = ("prior_l1_mean", "prior_kl_mean", "s_error_mean")
        estimates = self._estimates()
        if not estimates:
            return dict.fromkeys((*names, *means))
        counts = self.training_counts
        truth = from_counts(np.bincount(labels, minlength=len(estimates[0])))
        rows = [(*prior_error(e, truth), imbalance_error(e, truth, counts)) for e in estimates]
        errors = np.array(rows)
        final = zip(names, errors[-1].tolist(), strict=True)
        return {**dict(final), **dict(zip(means, errors.mean(0).tolist(), strict=True))}


@dataclass(frozen=True, eq=False)
class _Batch:
    """What the recorder stores of a batch: a few numbers per image."""

    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    confidence: Floats
    nll: Floats
    prior: Prior | None
    seconds: float


def _accuracy_over(batches: Sequence[_Batch]) -> float:
    return float(np.concatenate([b.predicted == b.labels for b in batches]).mean())


def _array(values: Values) -> NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _pair(predicted: Values, labels: Values) -> tuple[NDArray[Any], NDArray[Any]]:
    p, y = _array(predicted), _array(labels)
    if p.ndim != 1 or p.shape != y.shape or not len(y):
        must_be, got = "two vectors of equal length, not empty", f"{p.shape} and {y.shape}"
        raise InputError("predictions and labels", must_be=must_be, got=got)
    return p, y
