"""How far a stream is from what is known of the source: its labels, its images, its layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from twoshift.methods._appearance import Appearance, distance
from twoshift.methods.matched import SourceMoments
from twoshift.models.norm import batch_norms
from twoshift.models.statistics import fused_statistics
from twoshift.priors import check_prior

Array = NDArray[np.float64]
BEYOND = 2.0  # standard deviations outside of all that was seen: contrast at its worst is not
BY_CHANCE = 0.05  # how often sampling alone exceeds what is said of it
FAR = 12.0  # distances of a single class: the worst of usual corruptions reaches 11


def label_distance(labels: ArrayLike, others: ArrayLike) -> float:
    """Total variation distance of two label distributions: half the sum of differences."""
    a, b = np.asarray(labels, np.float64), np.asarray(others, np.float64)
    return float(np.abs(a - b).sum() / 2)


def by_chance(labels: ArrayLike, images: float) -> float:
    """The distance that sampling alone would hardly exceed: in 5 % of samples or fewer.

    The frequencies of n images with label distribution q are on average

        sum_c E|X_c - n q_c| / 2n,   X_c binomial,

    away from q, where De Moivre's formula gives E|X - np| = 2 k C(n, k) p^k (1 - p)^(n - k + 1)
    with k = floor(np) + 1. One image moves the distance by 1 / n at most, so by McDiarmid's
    inequality it is above its mean by sqrt(log(1 / 0.05) / 2n) with probability 0.05 at most.

    Args:
        labels: The label distribution.
        images: Number of images, 1 or more.
    """
    p = check_prior(np.asarray(labels, np.float64), len(np.atleast_1d(labels)))
    n = max(1, int(images))
    inner = p[(p > 0) & (p < 1)]
    k = np.floor(n * inner) + 1
    choose = np.array([_log_choose(n, int(j)) for j in k])
    log_mean = np.log(2 * k) + choose + k * np.log(inner) + (n - k + 1) * np.log1p(-inner)
    mean = float(np.exp(log_mean).sum() / (2 * n))
    return min(1.0, mean + math.sqrt(-math.log(BY_CHANCE) / (2 * n)))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


class KnownImages:
    """What images looked like when the classifier was calibrated.

    Args:
        appearance: See `twoshift.calibration.Classifier`.
    """

    def __init__(self, appearance: Appearance) -> None:
        low, high, mean, variance = np.array(appearance, np.float64)
        reach = BEYOND * np.sqrt(variance)
        self._low, self._high = low - reach, high + reach
        self._summary = np.stack([np.ones_like(mean), mean, variance])

    def outside(self, seen: Array) -> NDArray[np.bool_]:
        """Which images look like none of them: too bright, dark, flat, harsh, smooth or rough.

        Args:
            seen: Brightness, contrast and detail of every image, (B, 3).
        """
        return ((seen < self._low) | (seen > self._high)).any(1)

    def distance(self, seen: Array) -> float:
        """How far images are on average, as a mean square in standard deviations of an image."""
        return distance(self._summary, np.stack([self._summary[0], seen.mean(0), self._summary[2]]))


class LayerDistances:
    """How far the statistics of images are, layer by layer, from those of source images.

    The distance of a layer is a mean over its channels of squared differences: of means, in
    standard deviations, and of logarithms of variances. Compared are source images with the same
    labels.

    Args:
        model: The unadapted network, in evaluation mode; it is only looked at.
        moments: The fact ``moments`` of its calibration.
        classes: Number of classes.

    Attributes:
        far: A distance, mean over layers, that neither labels nor usual corruptions reach.
    """

    def __init__(self, model: nn.Module, moments: Mapping[str, Tensor], classes: int) -> None:
        layers = dict(batch_norms(model))
        self.names = list(layers)
        self._source = SourceMoments(model, moments, classes)
        self._sizes = [layer.num_features for layer in layers.values()]
        self._eps = torch.cat(
            [torch.full((n.num_features,), n.eps, dtype=torch.float64) for n in layers.values()]
        )
        self._layers, self._seen = layers, dict[str, Tensor]()
        # a single class against all of them: the most that labels can do
        each = torch.eye(classes, dtype=torch.float64)
        all_labels = torch.full((classes,), 1 / classes, dtype=torch.float64)
        expected = self._source.mixture(all_labels)
        apart = [self._by_layer(self._source.mixture(one), expected).mean() for one in each]
        self.far = FAR * float(max(apart))

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at every pass of the model within the block; nothing is left behind in it."""
        self._seen.clear()
        hooks = [
            layer.register_forward_pre_hook(partial(self._look, name))
            for name, layer in self._layers.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _look(self, name: str, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._seen[name] = torch.stack(fused_statistics(inputs[0]))

    def read(self, prior: ArrayLike) -> dict[str, float]:
        """The distance of every layer that the last pass of the model used, by name.

        Args:
            prior: Label distribution of the images, as it is estimated.
        """
        labels = torch.as_tensor(np.asarray(prior, np.float64))
        expected = self._source.mixture(labels)
        parts = expected.split(self._sizes, 1)
        seen = [self._seen.get(n, part) for n, part in zip(self.names, parts, strict=True)]
        both = torch.cat([part.detach().cpu().double() for part in seen], 1)
        distances = self._by_layer(both, expected).tolist()
        named = dict(zip(self.names, distances, strict=True))
        found = {name: named[name] for name in self.names if name in self._seen}
        self._seen.clear()
        return found

    def _by_layer(self, seen: Tensor, expected: Tensor) -> Tensor:
        wide = expected[1] + self._eps
        away = (seen[0] - expected[0]).square() / wide
        narrower = ((seen[1] + self._eps) / wide).log().square()
        return torch.stack([part.mean() for part in (away + narrower).split(self._sizes)])
