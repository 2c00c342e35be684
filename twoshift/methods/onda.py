"""ONDA: the running statistics follow the stream, a few images at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twoshift.errors import SettingError
from twoshift.methods.base import Method, methods
from twoshift.methods.bn_stats import require_batch_norm
from twoshift.methods.reservoir import between_updates, check_keepable, in_layout_of
from twoshift.models.norm import batch_norms


@methods.register("onda")
class ONDA(Method):
    """Predict by running statistics, which move after every few images; no parameter moves.

    Images are counted over the stream: how it is cut into batches makes no difference. Those
    that wait for the next update are part of the state.

    Args:
        model: The classifier.
        update_every: Images between two updates; the statistics of these images are the update.
        momentum: Weight of an update in the running statistics.
    """

    title = "ONDA"
    reference = (
        "Mancini et al., Kitting in the wild through online domain adaptation, IROS 2018, "
        "https://arxiv.org/abs/1807.01028"
    )

    def __init__(self, model: nn.Module, update_every: int = 10, momentum: float = 0.1) -> None:
        super().__init__(model)
        require_batch_norm(model)
        if not isinstance(update_every, int) or update_every < 2:
            # a single image may have no variance
            raise SettingError("update_every", must_be="a whole number from 2", got=update_every)
        if not 0 <= momentum <= 1:
            raise SettingError("momentum of the statistics", must_be="from 0 to 1", got=momentum)
        self.update_every, self.momentum = update_every, momentum
        self._layers = [layer for _, layer in batch_norms(self.model)]
        for layer in self._layers:
            layer.momentum = momentum
        self.ready()

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Tensor:
        """Predict up to the next update, move the statistics, and so on."""
        check_keepable(x)
        waiting, logits = self.memory.get("waiting", x[:0]), []
        for chunk in between_updates(x, len(waiting), self.update_every):
            logits.append(self.predict(chunk))
            waiting = torch.cat([waiting, chunk]) if len(waiting) else chunk
            if len(waiting) == self.update_every:
                self._follow(in_layout_of(x, waiting))
                waiting = x[:0]
        self.memory = {"waiting": waiting.clone()} if len(waiting) else {}
        return torch.cat(logits)

    def _follow(self, images: Tensor) -> None:
        try:
            for layer in self._layers:
                layer.train()
            self.model(images)
        finally:
            for layer in self._layers:
                layer.eval()
