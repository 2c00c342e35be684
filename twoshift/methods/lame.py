"""LAME: similar samples of a batch agree on their labels; the model stays as it is."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.methods.base import Method, methods
from twoshift.models.head import capture_features, find_head
from twoshift.models.norm import fix_statistics
from twoshift.registry import check_choice, check_numbers

AFFINITIES = ("knn", "rbf", "linear")


@methods.register("lame")
class LAME(Method):
    """Laplacian-adjusted maximum likelihood: similar samples of a batch get similar labels.

    Nothing moves and no sample is remembered. The returned logits are the logarithms of the
    adjusted probabilities.

    Args:
        model: The classifier.
        affinity: How similar two samples are: ``"knn"``, ``"rbf"`` or ``"linear"``.
        k: Number of neighbours; for ``"rbf"``, the width is the distance to the k-th nearest
            sample, counting the sample itself.
        max_steps: Largest number of updates per batch.
    """

    title = "LAME"
    reference = (
        "Boudiaf et al., Parameter-free online test-time adaptation, CVPR 2022, "
        "https://arxiv.org/abs/2201.05718"
    )

    def __init__(
        self, model: nn.Module, affinity: str = "knn", k: int = 5, max_steps: int = 100
    ) -> None:
        super().__init__(model)
        check_choice("lame", AFFINITIES, affinity=affinity)
        check_numbers("lame", "a whole number from 1", k=k, max_steps=max_steps)
        self.affinity, self.k, self.max_steps = affinity, k, max_steps
        self._head = find_head(self.model)[0]
        fix_statistics(self.model)
        self.ready()

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Scores:
        """Predict, then let neighbours agree."""
        with capture_features(self.model.get_submodule(self._head)) as features:
            scores = self.predict(x)
        if len(x) == 1:
            return scores._replace(logits=scores.logits.log_softmax(1), features=None)
        weights = affinities(features[0].flatten(1).to(scores.logits), self.affinity, self.k)
        agreed = agree(scores.logits, weights, self.max_steps)
        return scores._replace(logits=agreed, features=None)


def affinities(features: Tensor, kind: str, k: int) -> Tensor:
    """How much each sample (row) listens to each other one, (B, B), from directions alone."""
    points = F.normalize(features, dim=1)
    if kind == "linear":
        return points @ points.T
    # not by matrix products: duplicates must be at distance zero
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    if kind == "rbf":
        kth = distances.topk(min(k, len(points)), largest=False).values[:, -1]
        width = kth.mean().clamp(min=1e-12)  # zero for k = 1, and for equal samples
        return (-0.5 * (distances / width).square()).exp()
    others = distances.fill_diagonal_(math.inf)
    nearest = others.topk(min(k, len(points) - 1), largest=False).indices
    return torch.zeros_like(distances).scatter_(1, nearest, 1.0)


def agree(logits: Tensor, weights: Tensor, max_steps: int) -> Tensor:
    """Log-probabilities at the end of LAME's updates, Y <- softmax(log p + W Y).

    They stop after ``max_steps``, or earlier once the energy no longer changes.
    """
    log_p = (logits.softmax(1) + 1e-10).log()
    log_y = log_p.log_softmax(1)
    before = math.inf
    for i in range(max_steps):
        pull = log_p + weights @ log_y.exp()
        log_y = pull.log_softmax(1)
        energy = float((log_y.exp() * (log_y - pull)).sum())
        if i > 1 and abs(energy - before) <= 1e-8 * abs(before):
            break
        before = energy
    return log_y
