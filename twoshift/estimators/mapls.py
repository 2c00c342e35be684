"""MAPLS: maximum a posteriori label shift estimation, pulled towards equally frequent classes.

Ye et al., "Label shift estimation for class-imbalance problem: a Bayesian approach", WACV 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from twoshift.estimators._window import Array, Calibrated, shares
from twoshift.estimators.base import estimators
from twoshift.estimators.em import em_prior
from twoshift.priors import uniform
from twoshift.registry import check_numbers

UNIT, LEAST = 0.5, 0.2  # of the authors' rule: a divergence, and its weight


@estimators.register("mapls")
class MAPLS(Calibrated):
    """EM over the last predictions, in which a part of every step is the uniform distribution.

    The part is what is missing of ``weight`` to 1. By the authors' rule, it is the smaller, the
    further the estimate without it is from uniform.

    Args:
        classes: Number of classes.
        source_prior: Label distribution of the training images, for the rule; uniform by default.
        model_prior: Label distribution that the (calibrated) probabilities assume; uniform by
            default, as for ``em``.
        temperature: T of the calibrated probabilities softmax(log p / T + bias).
        bias: Bias of the calibrated probabilities, one number per class; none by default.
        weight: Weight of the predictions in a step, from 0 to 1; None for the authors' rule.
        window: Number of predictions to keep.
        max_steps: Largest number of EM steps per batch, twice by the rule.
        tol: Stop when a step moves the distribution by less (sum of absolute changes).
    """

    def __init__(
        self,
        classes: int,
        source_prior: Sequence[float] | None = None,
        model_prior: Sequence[float] | None = None,
        temperature: float = 1.0,
        bias: ArrayLike | Tensor | None = None,
        weight: float | None = None,
        window: int = 512,
        max_steps: int = 100,
        tol: float = 1e-6,
    ) -> None:
        super().__init__(classes, window, temperature, bias)
        if weight is not None:
            check_numbers("mapls", "from 0 to 1", weight=weight)
        check_numbers("mapls", "at least 1", max_steps=max_steps)
        check_numbers("mapls", "at least 0", tol=tol)
        self._source, self.source_prior = shares("source_prior of mapls", source_prior, classes)
        self._assumed, self.model_prior = shares("model_prior of mapls", model_prior, classes)
        self.weight, self.max_steps, self.tol = weight, max_steps, tol
        self.reset()

    def solve(self, rows: Array, before: Array) -> Array:
        """EM from uniform, first without a pull if the rule needs that."""
        start, ratios = uniform(self.classes), rows / self._assumed
        weight = self.weight
        if weight is None:
            free = em_prior(ratios, start, 0.0, self.max_steps, self.tol)
            weight = chosen_weight(free, self._source)
        if weight == 0:
            return start
        # the pull of a Dirichlet prior, in images of every class
        pseudo_count = len(rows) * (1 - weight) / (weight * self.classes)
        return em_prior(ratios, start, pseudo_count, self.max_steps, self.tol)


def chosen_weight(estimate: Array, source_prior: Array) -> float:
    """The authors' weight of the predictions: near 1 far from uniform, smaller near to it."""
    level = uniform(len(estimate))
    of_source = 1 - _share(divergence(source_prior, level), _scale(LEAST))
    scale = _scale(of_source)
    far, like = divergence(estimate, level), divergence(estimate, source_prior)
    return 0.9 * _share(far, scale) + 0.1 * (1 - _share(like, scale))


def divergence(p: Array, q: Array) -> float:
    """Kullback-Leibler divergence of ``p`` from ``q``, which is above 0 for every class."""
    some = p > 0
    return max(0.0, float((p[some] * np.log(p[some] / q[some])).sum()))


def _scale(share: float) -> float:
    """The scale at which a divergence of `UNIT` has a share; infinite for all of it."""
    return math.inf if share >= 1 else share / (1 - share) / UNIT


def _share(distance: float, scale: float) -> float:
    """From 0 for no divergence towards 1."""
    if distance == 0:
        return 0.0
    product = scale * distance
    return 1.0 if math.isinf(product) else product / (1 + product)
