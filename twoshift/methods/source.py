"""The source model as it is: no adaptation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.methods.base import Method, methods
from twoshift.models.norm import fix_statistics


@methods.register("source")
class Source(Method):
    """The source model without adaptation: running statistics, nothing moves."""

    title = "Source"
    reference = "the model as it was trained"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        fix_statistics(self.model)
        self.ready()

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Scores:
        """Predict by the source model."""
        return self.predict(x)
