"""What is measured on a stream: pure functions first, then the recorder that collects them.

Labels, predictions and probabilities may be tensors or arrays; numbers come back as plain floats.
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
EDGE = 10  # batches at either end of a stream that are also reported by themselves
FEW = 10  # seeds below which a bootstrap says too little
FLOOR = 1e-8  # a class that is never predicted costs much, not infinitely much


def accuracy(predicted: Values, labels: Values) -> float:
    """Share of right predictions."""
    p, y = _pair(predicted, labels)
    return float((p == y).mean())


def recalls(predicted: Values, labels: Values, classes: int) -> Floats:
    """Recall of every class; NaN for a class that does not occur."""
    p, y = _pair(predicted, labels)
    if not 0 <= y.min() <= y.max() < classes:
        raise InputError("labels", must_be=f"0 to {classes - 1}", got=f"{y.min()} to {y.max()}")
    there = np.bincount(y, minlength=classes)
    found = np.bincount(y[p == y], minlength=classes)
    return np.divide(found, there, out=np.full(len(there), np.nan), where=there > 0)


def balanced_accuracy(predicted: Values, labels: Values) -> float:
    """Mean recall over the classes that occur."""
    p, y = _pair(predicted, labels)
    return float(np.nanmean(recalls(p, y, int(y.max()) + 1)))


def class_groups(training_counts: ArrayLike) -> dict[str, NDArray[np.int64]]:
    """Head, medium and tail: thirds of the classes by the rank of their training count."""
    return dict(zip(GROUPS, np.array_split(class_order(training_counts), 3), strict=True))


def recall_by_group(
    predicted: Values, labels: Values, training_counts: ArrayLike
) -> dict[str, float | None]:
    """Mean recall over the occurring classes of each group; None where none occurs."""
    groups = class_groups(training_counts)
    each = recalls(predicted, labels, sum(map(len, groups.values())))
    return {
        name: float(np.nanmean(each[group])) if np.isfinite(each[group]).any() else None
        for name, group in groups.items()
    }


def ece(probs: Values, labels: Values, bins: int = 15) -> float:
    """Expected calibration error of the top prediction, over bins (low, high] of equal width."""
    p, y = _array(probs), _array(labels)
    if p.ndim != 2 or len(p) != len(y) or not len(y):
        raise InputError("probabilities", must_be="(N, classes) for N labels", got=p.shape)
    return _calibration_error(p.max(1), p.argmax(1) == y, bins)


def _calibration_error(confidence: Floats, right: NDArray[np.bool_], bins: int) -> float:
    edges = np.linspace(0, 1, bins + 1)
    place = np.searchsorted(edges[1:-1], confidence, side="left")
    gaps = np.bincount(place, weights=right - confidence.astype(np.float64), minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))


def nll(logits: Values, labels: Values) -> float:
    """Mean negative log-likelihood, from logits: finite where a softmax would be zero."""
    z, y = torch.as_tensor(logits), torch.as_tensor(labels)
    return float(_surprise(z, y).mean())


def _surprise(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.double(), labels.long(), reduction="none")


class PriorDistance(NamedTuple):
    """How far a label estimate is from the truth."""

    l1: float
    kl: float


def prior_error(estimate: Values, truth: Values) -> PriorDistance:
    """L1 distance, and KL(truth || estimate) with the estimate floored at ``FLOOR``."""
    p = check_prior(_array(truth), whose="true prior")
    q = check_prior(_array(estimate), len(p), "label estimate")
    used = p > 0
    kl = (p[used] * np.log(p[used] / np.maximum(q[used], FLOOR))).sum()
    return PriorDistance(float(np.abs(p - q).sum()), float(max(kl, 0.0)))


def imbalance(prior: Values, training_counts: ArrayLike) -> float:
    """Imbalance degree s: +1 if all labels are of the head class, -1 if of the rarest one."""
    order = class_order(training_counts)
    p = check_prior(_array(prior), len(order))
    return float(np.linspace(1, -1, len(order)) @ p[order])


def imbalance_error(estimate: Values, truth: Values, training_counts: ArrayLike) -> float:
    """Signed error of s: positive if the estimate leans too far to the head."""
    return imbalance(estimate, training_counts) - imbalance(truth, training_counts)


def bootstrap_interval(
    values: Sequence[float] | Floats, seed: int = 0, level: float = 0.95, draws: int = 10_000
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean, over seeds."""
    v = np.asarray(values, dtype=np.float64)
    if v.ndim != 1 or len(v) < 2 or not np.isfinite(v).all():
        raise InputError("values of a bootstrap", must_be="two or more finite numbers", got=values)
    if not 0 < level < 1:
        raise InputError("level", must_be="between 0 and 1", got=level)
    means = v[np.random.default_rng(seed).integers(len(v), size=(draws, len(v)))].mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean_interval(values: Sequence[float] | Floats, level: float = 0.95) -> tuple[float, float]:
    """Interval of the mean over seeds: bootstrap, or Student's t where seeds are few.

    Below ten values the percentile bootstrap is little more than their range, which covers the
    mean far too seldom.
    """
    v = np.asarray(values, dtype=np.float64)
    if len(v) >= FEW:
        return bootstrap_interval(v, level=level)
    bootstrap_interval(v, level=level, draws=1)  # refuses what is no sample
    from scipy import stats

    reach = stats.t.ppf((1 + level) / 2, len(v) - 1) * v.std(ddof=1) / np.sqrt(len(v))
    return float(v.mean() - reach), float(v.mean() + reach)


class Difference(NamedTuple):
    """Mean of a - b over paired runs, with its interval."""

    mean: float
    low: float
    high: float


def paired_difference(
    a: Sequence[float] | Floats, b: Sequence[float] | Floats, level: float = 0.95
) -> Difference:
    """How much better ``a`` is than ``b`` on identical streams."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.shape != y.shape:
        raise InputError("paired values", must_be="equally many", got=f"{x.shape} and {y.shape}")
    return Difference(float((x - y).mean()), *mean_interval(x - y, level))


@dataclass
class Recorder:
    """Collects a stream's batches and sums them up.

    Args:
        training_counts: Images per class in training; they say what is head and what is tail.
    """

    training_counts: ArrayLike
    _batches: list[_Seen] = field(default_factory=list, init=False, repr=False)

    def update(
        self, logits: Tensor, labels: Tensor, prior: Tensor | None = None, seconds: float = 0.0
    ) -> None:
        """Take in a batch.

        Args:
            logits: The scored logits, (B, classes).
            labels: The true labels, (B,).
            prior: The label estimate at this moment, from every batch or from none.
            seconds: What the batch took.
        """
        logits, labels = logits.detach().cpu().double(), labels.detach().cpu().clone()
        expected = (len(labels), len(np.asarray(self.training_counts)))
        if logits.shape != expected or not len(labels):
            raise BatchError("logits", must_be=expected, got=tuple(logits.shape))
        if not logits.isfinite().all():
            raise BatchError(f"logits of batch {len(self._batches)}", must_be="finite")
        if self._batches and (prior is None) != (self._batches[0].prior is None):
            raise InputError("label estimate", must_be="given for every batch or for none")
        confidence, predicted = logits.softmax(1).max(1)
        self._batches.append(
            _Seen(
                labels=labels.numpy(),
                predicted=predicted.numpy(),
                confidence=confidence.numpy(),
                surprise=_surprise(logits, labels).numpy(),
                prior=None if prior is None else check_prior(_array(prior), expected[1]),
                seconds=seconds,
            )
        )

    def summary(self) -> dict[str, Any]:
        """The numbers of the protocol; None where there is nothing to measure."""
        if not self._batches:
            raise InputError("a summary", must_be="of at least one batch", got="none")
        seen = self._batches
        labels = np.concatenate([b.labels for b in seen])
        predicted = np.concatenate([b.predicted for b in seen])
        confidence = np.concatenate([b.confidence for b in seen])
        groups = recall_by_group(predicted, labels, self.training_counts)
        p50, p95 = np.percentile([1000 * b.seconds for b in seen], [50, 95])
        return {
            "images": len(labels),
            "batches": len(seen),
            "accuracy": accuracy(predicted, labels),
            "balanced_accuracy": balanced_accuracy(predicted, labels),
            **{f"{name}_recall": groups[name] for name in GROUPS},
            "ece": _calibration_error(confidence, predicted == labels, bins=15),
            "nll": float(np.concatenate([b.surprise for b in seen]).mean()),
            **self._estimate_errors(labels),
            f"accuracy_first{EDGE}": _accuracy_over(seen[:EDGE]),
            f"accuracy_last{EDGE}": _accuracy_over(seen[-EDGE:]),
            "ms_per_batch_p50": float(p50),
            "ms_per_batch_p95": float(p95),
        }

    def trace(self) -> dict[str, list[Any]]:
        """One entry per batch: accuracy, label estimate and its s (empty without an estimate)."""
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
        errors = np.array(
            [(*prior_error(e, truth), imbalance_error(e, truth, counts)) for e in estimates]
        )
        final = zip(names, errors[-1].tolist(), strict=True)
        return {**dict(final), **dict(zip(means, errors.mean(0).tolist(), strict=True))}


@dataclass(frozen=True, eq=False)
class _Seen:
    """What is kept of a batch: a few numbers per image."""

    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    confidence: Floats
    surprise: Floats
    prior: Prior | None
    seconds: float


def _accuracy_over(batches: Sequence[_Seen]) -> float:
    right = np.concatenate([b.predicted == b.labels for b in batches])
    return float(right.mean())


def _array(values: Values) -> NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _pair(predicted: Values, labels: Values) -> tuple[NDArray[Any], NDArray[Any]]:
    p, y = _array(predicted), _array(labels)
    if p.ndim != 1 or p.shape != y.shape or not len(y):
        raise InputError(
            "predictions and labels",
            must_be="two vectors of one length, not empty",
            got=f"{p.shape} and {y.shape}",
        )
    return p, y
