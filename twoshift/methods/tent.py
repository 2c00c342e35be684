"""TENT: entropy minimisation on the affine parameters of the normalisation layers.

Wang et al., "Tent: Fully test-time adaptation by entropy minimization", ICLR 2021,
https://arxiv.org/abs/2006.10726.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from twoshift.methods.base import Method, entropy, make_optimizer, methods, norm_affine, paths
from twoshift.models.norm import use_batch_statistics


@methods.register("tent")
class Tent(Method):
    """Batch statistics, and one entropy step per batch on the norm layers' weights and biases.

    The logits of the forward pass before the step are the prediction. Layer and group norms
    have no batch statistics; only their weights move.

    Args:
        model: The classifier.
        lr: Learning rate.
        optim: ``"adam"`` or ``"sgd"`` (momentum 0.9, as on ImageNet).
        freeze: Paths of modules whose weights stay, for example ``["layer4"]``.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        optim: str = "adam",
        freeze: Sequence[str] = (),
    ) -> None:
        super().__init__(model)
        self.lr, self.optim, self.freeze = lr, optim, paths(freeze)
        use_batch_statistics(self.model)
        self.optimizer = make_optimizer(optim, norm_affine(self.model, self.freeze), lr)
        self.ready()

    def adapt(self, x: Tensor) -> Tensor:
        """Predict, then step."""
        logits = self.model(x)
        self.minimise(entropy(logits).mean())
        return logits
