"""IABN at test time: running statistics that follow slowly, and an entropy step.

Gong et al., "NOTE: Robust continual test-time adaptation against temporal correlation",
NeurIPS 2022, https://arxiv.org/abs/2208.05117, without its memory: the row "IABN" of the paper.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from twoshift.errors import ModelError, SettingError
from twoshift.methods.base import Method, entropy, make_optimizer, methods, norm_affine, paths
from twoshift.models.norm import InstanceAwareBatchNorm, batch_norms


@methods.register("iabn")
class IABN(Method):
    """IABN layers: predict by running statistics, then an entropy step on the same batch.

    As in NOTE, the prediction is made in evaluation mode; a second forward pass, in training
    mode, moves the running statistics and gives the gradient. The source model must have been
    trained with IABN layers.

    Args:
        model: The classifier.
        lr: Learning rate.
        momentum: Weight of a batch in the running statistics.
        optim: ``"adam"`` or ``"sgd"``.
        freeze: Paths of modules whose weights stay, for example ``["layer4"]``.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-4,
        momentum: float = 0.01,
        optim: str = "adam",
        freeze: Sequence[str] = (),
    ) -> None:
        super().__init__(model)
        if not 0 <= momentum <= 1:
            raise SettingError("momentum of iabn", must_be="from 0 to 1", got=momentum)
        self.lr, self.momentum = lr, momentum
        self.optim, self.freeze = optim, paths(freeze)
        self._layers = [m for _, m in batch_norms(self.model)]
        if not any(isinstance(m, InstanceAwareBatchNorm) for m in self._layers):
            raise ModelError(
                f"IABN layers in {type(model).__name__}",
                must_be="there from source training on",
                got="none",
                cure="Train the source model with norm='iabn', or use tent.",
            )
        for layer in self._layers:
            layer.momentum = momentum
        self.optimizer = make_optimizer(optim, norm_affine(self.model, self.freeze), lr)
        self.ready()

    def adapt(self, x: Tensor) -> Tensor:
        """Predict, then move statistics and weights."""
        with torch.no_grad():
            logits = self.model(x)
        self._follow_batch(True)
        try:
            loss = entropy(self.model(x)).mean()
        finally:
            self._follow_batch(False)
        self.minimise(loss)
        return logits

    def _follow_batch(self, on: bool) -> None:
        for layer in self._layers:
            layer.train(on)
