"""TRIBE: teacher, student and source model, each with balanced statistics of its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.methods._learning import entropy, make_optimizer, norm_affine, paths
from twoshift.methods._views import check_images, strong_view
from twoshift.methods.balanced_bn import BalancedBN, by_classes, check_statistics
from twoshift.methods.base import check_finite, methods
from twoshift.models.balanced_norm import BalancedNorm, moving
from twoshift.registry import check_numbers


@methods.register("tribe")
class TRIBE(BalancedBN):
    """A teacher that predicts, a student with the same weights, and the source model as an anchor.

    The teacher, which is the method's model, predicts the batch by its balanced statistics. Then
    all three take the batch into theirs. Where the teacher is sure, the student learns its label on
    a strong view, and its logits are pulled towards those of the source model: one step on the
    weights of the norm layers, which teacher and student share.

    Args:
        model: The classifier, with batch normalisation.
        lr: Learning rate.
        optim: ``"adam"`` or ``"sgd"`` (momentum 0.9).
        eta: How far one image moves the statistics of its class; None as in `BalancedBN`.
        gamma: The part of that movement that all classes share; None as in `BalancedBN`.
        margin: The teacher is sure below this share of the highest possible entropy; None for 0.05
            up to 10 classes, 0.2 up to 100, and 0.4 for more.
        anchor_weight: Weight of the pull towards the source model.
        freeze: Paths of modules whose weights stay, for example ``["layer4"]``.
    """

    title = "TRIBE"

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        optim: str = "adam",
        eta: float | None = None,
        gamma: float | None = None,
        margin: float | None = None,
        anchor_weight: float = 0.5,
        freeze: Sequence[str] = (),
    ) -> None:
        super().__init__(model, eta, gamma)
        self.lr, self.optim, self.margin, self.freeze = lr, optim, margin, paths(freeze)
        self.anchor_weight = anchor_weight
        share = by_classes(self._classes, 0.05, 0.2, 0.4) if margin is None else margin
        check_numbers("tribe", "above 0", margin=share)
        check_numbers("tribe", "at least 0 and finite", anchor_weight=anchor_weight)
        self._limit = share * math.log(self._classes)
        trained = norm_affine(self.model, self.freeze)
        with torch.inference_mode(False):  # as in Method: the copies must be able to move
            own = {id(p) for p in trained}
            frozen = [p for p in self.model.parameters() if id(p) not in own]
            self.student = copy_around(self.model, [*self.model.parameters()])
            self.source = copy_around(self.model, frozen)
        self._layers = [m for m in self.modules() if isinstance(m, BalancedNorm)]
        self.optimizer = make_optimizer(optim, trained, lr)
        self.ready()

    def adapt(self, x: Tensor) -> Scores:
        """Predict by the teacher, take the batch into all statistics, and step."""
        check_images(x)
        with torch.no_grad():
            scores = self.predict(x)
        view = strong_view(x, self.generator)
        with moving(self._layers, scores.logits.argmax(1), self._eta):
            with torch.no_grad():
                source = self.source(x)
            teacher, student = self.model(x), self.student(view)
        sure = entropy(teacher.detach()) < self._limit
        if sure.any():  # a mean over none would be NaN
            self._step(teacher[sure], student[sure], source[sure])
        check_statistics(self._layers)
        return scores

    def _step(self, teacher: Tensor, student: Tensor, source: Tensor) -> None:
        labels = F.cross_entropy(student, teacher.detach().argmax(1))
        self.minimise(labels + self.anchor_weight * F.mse_loss(teacher, source))
        # a gradient may overflow where the loss did not
        with torch.no_grad():
            norms = torch.stack(torch._foreach_norm(tuple(self._optimised())))
        check_finite("the weights after the step", norms)


def copy_around(model: nn.Module, shared: Sequence[nn.Parameter]) -> nn.Module:
    """A copy of ``model`` with the same ``shared`` parameters, and buffers of its own."""
    return copy.deepcopy(model, {id(p): p for p in shared})
