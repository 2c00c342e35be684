"""IM loss: information maximisation, the loss of SHOT, one step per batch."""

from __future__ import annotations

import math

from torch import Tensor

from twoshift.methods._one_step import OneStep
from twoshift.methods.base import methods


@methods.register("im_loss")
class IMLoss(OneStep):
    """Sure predictions of many classes: mean entropy minus the entropy of the mean prediction.

    One step per batch on the weights and biases of the normalisation layers. IABN layers predict by
    running statistics, which then move towards the batch's; other layers use the batch's own.

    Args:
        model: The classifier.
        lr: Learning rate.
        optim: ``"adam"`` or ``"sgd"``.
        freeze: Paths of modules whose weights stay, for example ``["layer4"]``.
        momentum: Weight of a batch in the running statistics of IABN layers.
        bound: How far one batch may move the running statistics, in standard deviations: see
            `twoshift.models.norm.bounded_statistics`; None for no bound.
    """

    title = "IM loss"
    reference = (
        "Liang et al., Do we really need to access the source data? Source hypothesis transfer "
        "for unsupervised domain adaptation, ICML 2020, https://arxiv.org/abs/2002.08546"
    )

    def loss(self, logits: Tensor) -> Tensor:
        """The negative information."""
        return -information(logits)


def information(logits: Tensor) -> Tensor:
    """Entropy of the mean prediction minus the mean entropy of the predictions."""
    log_p = logits.log_softmax(1)
    log_mean = log_p.logsumexp(0) - math.log(len(log_p))
    # as a mean divergence: a batch of one gives zero, and a gradient of exactly zero
    return (log_p.exp() * (log_p - log_mean)).sum(1).mean()
