"""Other ways to tell accuracy without labels, to compare `ExpectedAccuracy` with.

Each is a function of the predicted probabilities of a window of images, p of shape (N, C):

- CBPE, mean confidence: known by this name from the package NannyML.
- DoC, difference of confidences: Guillory et al., ICCV 2021, https://arxiv.org/abs/2107.03315.
- ATC, average thresholded confidence: Garg et al., ICLR 2022, https://arxiv.org/abs/2201.04234.
- COT, confidence optimal transport: Lu et al., NeurIPS 2023, https://arxiv.org/abs/2305.15640;
  with the labels of the stream in place of the source's, it is called Q-COT here.
- Nuclear norm: Deng et al., ICML 2023, https://arxiv.org/abs/2302.01094.
- AETTA, disagreement under dropout: Lee et al., CVPR 2024, https://arxiv.org/abs/2404.01351.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linprog
from scipy.sparse import eye_array, kron
from torch import Tensor

from twoshift.errors import BatchError
from twoshift.priors import check_prior

Array = NDArray[np.float64]
PASSES, RATE, ALPHA = 10, 0.4, 3.0  # of AETTA, as its authors on CIFAR-10


def mean_confidence(probs: ArrayLike | Tensor) -> float:
    """CBPE: mean_i max_c p_ic. Right where p are the true posteriors."""
    return float(_checked(probs).max(1).mean())


def difference_of_confidences(
    probs: ArrayLike | Tensor, source_accuracy: float, source_confidence: float
) -> float:
    """DoC: accuracy(source) + mean confidence - mean confidence(source), clipped to [0, 1].

    Args:
        probs: Predicted probabilities, (N, C).
        source_accuracy: Accuracy on labelled source images.
        source_confidence: Mean confidence for these.
    """
    value = source_accuracy + mean_confidence(probs) - source_confidence
    return min(max(value, 0.0), 1.0)


def thresholded_confidence(probs: ArrayLike | Tensor, threshold: float) -> float:
    """ATC: share of images with max_c p_ic above a threshold.

    Args:
        probs: Predicted probabilities, (N, C).
        threshold: The confidence above which as many source images are as predictions for them
            are right: `confidence_threshold`.
    """
    return float((_checked(probs).max(1) > threshold).mean())


def confidence_threshold(probs: ArrayLike | Tensor, accuracy: float) -> float:
    """The threshold of ATC: the quantile 1 - accuracy of the confidences for source images."""
    return float(np.quantile(_checked(probs).max(1), 1 - accuracy))


def transport(probs: ArrayLike | Tensor, labels: ArrayLike | Tensor) -> float:
    """COT: 1 - W / 2, W the earth mover's distance between the p and one-hot labels.

    Moving p to the one-hot vector of class c costs ||p - e_c||_1 = 2 (1 - p_c). So it is the
    largest sum_ic t_ic p_ic over plans t >= 0 with sum_c t_ic = 1 / N and sum_i t_ic = labels_c:
    the mean probability of labels that are given to images as well as their shares permit. Solved
    exactly, as a linear program.

    Args:
        probs: Predicted probabilities, (N, C).
        labels: Label distribution of the one-hot vectors, (C,): COT takes that of the source,
            Q-COT an estimate for the stream.
    """
    p = _checked(probs)
    images, classes = p.shape
    shares = check_prior(np.asarray(labels, np.float64), classes, "labels of transport")
    by_image = kron(eye_array(images), np.ones((1, classes)), format="csr")
    by_class = kron(np.ones((1, images)), eye_array(classes), format="csr")
    solved = linprog(
        -p.ravel(),
        A_ub=by_image,  # not equal to 1 / N: the total is 1, so it is anyway
        b_ub=np.full(images, 1 / images),
        A_eq=by_class,
        b_eq=shares,
        method="highs",
    )
    assert solved.success, solved.message
    return float(-solved.fun)


def nuclear_norm(probs: ArrayLike | Tensor) -> float:
    """Sum of the singular values of p over sqrt(min(N, C) N), from 0 to 1.

    A score, not an accuracy: 1 if every image is sure and all classes are equally frequent.
    """
    p = _checked(probs)
    values = np.linalg.svd(p, compute_uv=False)
    return float(values.sum() / math.sqrt(min(p.shape) * len(p)))


def dropout_disagreement(probs: ArrayLike | Tensor, dropped: ArrayLike | Tensor) -> float:
    """AETTA: 1 - D / (H / log C)^3, clipped to [0, 1].

    D is the share of predictions that change under dropout, H the entropy of the mean prediction
    under dropout: predictions of few classes count as wrong, since adaptation that fails makes
    such ones. So do streams of few classes.

    Args:
        probs: Predicted probabilities, (N, C), more than one class.
        dropped: The same under dropout, (passes, N, C); see `dropout_passes`.
    """
    p, q = _checked(probs), np.asarray(dropped, np.float64)
    if q.ndim != 3 or q.shape[1:] != p.shape or not len(q):
        must_be = f"(passes, {p.shape[0]}, {p.shape[1]})"
        raise BatchError("probabilities under dropout", must_be=must_be, got=q.shape)
    disagreement = (q.argmax(2) != p.argmax(1)).mean()
    mean = q.mean((0, 1))
    entropy = -float(np.sum(mean * np.log(np.where(mean > 0, mean, 1.0))))
    weight = (entropy / math.log(p.shape[1])) ** ALPHA
    error = float(disagreement) / weight if weight > 0 else float(disagreement > 0)
    return 1 - min(error, 1.0)


def dropout_passes(
    features: Tensor,
    head: Callable[[Tensor], Tensor],
    generator: torch.Generator,
    passes: int = PASSES,
    rate: float = RATE,
) -> Tensor:
    """Predicted probabilities under dropout of the features, (passes, N, C).

    Args:
        features: Input of the head, (N, d).
        head: From features to logits.
        generator: Draws what is dropped.
        passes: How often.
        rate: Share of the features that are set to zero; the others grow by 1 / (1 - rate).
    """
    found = []
    for _ in range(passes):
        kept = torch.rand(features.shape, generator=generator) >= rate
        found.append(head(features * kept.to(features) / (1 - rate)).softmax(1))
    return torch.stack(found)


def _checked(probs: ArrayLike | Tensor) -> Array:
    p = np.asarray(probs, np.float64)
    if p.ndim != 2 or not p.size:
        raise BatchError("predicted probabilities", must_be="(N, C), N > 0", got=p.shape)
    if not (np.isfinite(p).all() and (p >= 0).all() and (abs(p.sum(1) - 1) < 1e-3).all()):
        raise BatchError("predicted probabilities", must_be="at least 0, rows with sum 1")
    return p
