"""Balanced BN: statistics of the stream in which every class counts the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.methods.base import Method, check_finite, methods
from twoshift.methods.bn_stats import require_plain_batch_norm
from twoshift.models.balanced_norm import BalancedNorm, moving, use_balanced_statistics
from twoshift.models.head import class_count
from twoshift.registry import check_numbers


@methods.register("balanced_bn")
class BalancedBN(Method):
    """Every class has statistics of its own, and batches are normalised by the mean of all classes.

    The batch is predicted by the statistics so far; a second pass moves the statistics of the
    predicted classes. No parameter moves.

    Args:
        model: The classifier, with batch normalisation.
        eta: How far one image moves the statistics of its class; None for max(0.0005 C, 0.01),
            at most 1, where C is the number of classes.
        gamma: The part of that movement that all classes share; None for 0 up to 10 classes, 0.1 up
            to 100, and 0.5 for more.
    """

    title = "Balanced BN"
    reference = (
        "Su et al., Towards real-world test-time adaptation: Tri-net self-training with balanced "
        "normalization, AAAI 2024, https://arxiv.org/abs/2309.14949"
    )
    needs = frozenset({"batch norm layers"})
    not_negative = frozenset({"class_var"})

    def __init__(
        self, model: nn.Module, eta: float | None = None, gamma: float | None = None
    ) -> None:
        super().__init__(model)
        self.eta, self.gamma = eta, gamma
        require_plain_batch_norm(self.model, self.title)
        self._classes = class_count(self.model)
        self._eta = min(max(0.0005 * self._classes, 0.01), 1.0) if eta is None else eta
        shared = by_classes(self._classes, 0.0, 0.1, 0.5) if gamma is None else gamma
        check_numbers("balanced statistics", "above 0, at most 1", eta=self._eta)
        check_numbers("balanced statistics", "from 0 to 1", gamma=shared)
        with torch.inference_mode(False):  # as in Method: buffers that can be written later
            self._layers = use_balanced_statistics(self.model, self._classes, shared)
        self.ready()

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Scores:
        """Predict, then take the batch into the statistics."""
        scores = self.predict(x)
        with moving(self._layers, scores.logits.argmax(1), self._eta):
            self.model(x)
        check_statistics(self._layers)
        return scores


def by_classes(classes: int, few: float, some: float, many: float) -> float:
    """The authors' setting for up to 10 classes, up to 100, and more."""
    return few if classes <= 10 else some if classes <= 100 else many


def check_statistics(layers: list[BalancedNorm]) -> None:
    """Refuse a batch that makes statistics overflow."""
    check_finite("the statistics", torch.cat([s for m in layers for s in m.statistics()]))
