"""ISFDA, one step per batch: two labels per sample, compact classes, a frozen head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.methods._learning import entropy, make_optimizer, paths, trainable
from twoshift.methods.base import Method, methods
from twoshift.methods.im_loss import information
from twoshift.models.head import capture_features, find_head
from twoshift.models.norm import use_batch_statistics
from twoshift.registry import check_numbers


@methods.register("isfda")
class ISFDA(Method):
    """Online variant of ISFDA: its losses on the current batch only, one step per batch.

    The original trains for many epochs on all target data. Its curriculum, its class-balanced
    sampling and its pseudo-labels of a whole epoch are left out here. Published test-time results
    under this name do not say how it was run.

    Args:
        model: The classifier; all of it but the head is trained.
        lr: Learning rate.
        optim: ``"sgd"`` (momentum 0.9) or ``"adam"``.
        ce_weight: Weight of the cross-entropies.
        secondary_weight: Weight of the losses with the second label.
        intra_weight: Weight of the distance between samples of one class.
        inter_weight: Weight of the distance between samples of two classes, which is maximised.
        freeze: Paths of modules whose weights stay, for example ``["layer4"]``.
    """

    title = "ISFDA"
    reference = "Li et al., Imbalanced source-free domain adaptation, ACM Multimedia 2021"
    statistics = "batch"

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-4,
        optim: str = "sgd",
        ce_weight: float = 0.3,
        secondary_weight: float = 0.1,
        intra_weight: float = 1.0,
        inter_weight: float = 0.1,
        freeze: Sequence[str] = (),
    ) -> None:
        super().__init__(model)
        self.lr, self.optim, self.freeze = lr, optim, paths(freeze)
        self.ce_weight, self.secondary_weight = ce_weight, secondary_weight
        self.intra_weight, self.inter_weight = intra_weight, inter_weight
        weights = ("ce_weight", "secondary_weight", "intra_weight", "inter_weight")
        check_numbers("isfda", "at least 0 and finite", **{n: getattr(self, n) for n in weights})
        self._head = find_head(self.model)[0]
        use_batch_statistics(self.model)
        extractor = trainable(self.model, (self._head, *self.freeze))
        self.optimizer = make_optimizer(optim, list(extractor.values()), lr)
        self.ready()

    def adapt(self, x: Tensor) -> Scores:
        """Predict, then step."""
        with capture_features(self.model.get_submodule(self._head)) as features:
            scores = self.predict(x)
        self.minimise(self.loss(scores.logits, features[0].flatten(1).to(scores.logits)))
        return scores

    def loss(self, logits: Tensor, features: Tensor) -> Tensor:
        """Cross-entropy and information with both labels, and distances between samples."""
        log_p = logits.detach().log_softmax(1)
        primary = prototype_labels(features.detach(), log_p.exp())
        secondary = log_p.topk(min(2, log_p.shape[1])).indices[:, -1]
        # p2 / p1, at most 1; logarithms avoid 0 / 0
        ratio = (_pick(log_p, secondary) - _pick(log_p, primary)).clamp(max=0).exp()

        gained = information(logits)
        first = self.ce_weight * F.cross_entropy(logits, primary) - gained
        doubt = self.ce_weight * F.cross_entropy(logits, secondary, reduction="none")
        # the second information has its mean entropy weighted by the ratio
        second = (ratio * doubt + (ratio - 1) * entropy(logits)).mean() - gained
        within, between = class_distances(features, primary)
        spread = self.intra_weight * within - self.inter_weight * between
        return first + self.secondary_weight * second + spread


@torch.no_grad()
def prototype_labels(features: Tensor, probs: Tensor) -> Tensor:
    """Each sample's nearest class centre by cosine, as in SHOT: soft centres, then hard ones.

    Only predicted classes have a centre.
    """
    classes = probs.shape[1]
    points = F.normalize(F.pad(features, (0, 1), value=1.0), dim=1)
    weights, labels = probs, probs.argmax(1)
    has_centre = torch.zeros(classes, dtype=torch.bool, device=probs.device)
    has_centre[labels] = True
    for _ in range(2):
        centres = F.normalize(weights.T @ points, dim=1)
        labels = (points @ centres.T).masked_fill(~has_centre, -torch.inf).argmax(1)
        weights = F.one_hot(labels, classes).to(points)
        has_centre = weights.any(0)  # a class that lost its last sample has none
    return labels


def class_distances(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of (1 - cos) / 2 over pairs of the same class and over pairs of two classes.

    As in the original, a sample also makes a pair with itself; no pair gives zero.
    """
    unit = F.normalize(features, dim=1, eps=1e-6)
    distance = (0.5 - 0.5 * unit @ unit.T).triu(1)
    same = labels[:, None] == labels
    pairs = same.triu().sum(), (~same).triu().sum()
    within, between = (distance * same).sum(), (distance * ~same).sum()
    return within / pairs[0], between / pairs[1].clamp(min=1)


def _pick(rows: Tensor, columns: Tensor) -> Tensor:
    return rows.gather(1, columns[:, None]).squeeze(1)
