"""ONDA: the running statistics move with the stream, a few images at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.methods._reservoir import (
    between_updates,
    check_keepable,
    check_stored,
    in_layout_of,
    of_one_size,
)
from twoshift.methods.base import Method, methods
from twoshift.methods.bn_stats import require_batch_norm
from twoshift.models.base import expand
from twoshift.models.norm import (
    AnyBatchNorm,
    batch_norms,
    bounded_statistics,
    bounded_step,
    check_bound,
    has_iabn,
    in_training,
    replace_batch_norms,
)
from twoshift.registry import check_numbers


@methods.register("onda")
class ONDA(Method):
    """Predict by running statistics, which move after every few images; no parameter moves.

    Images are counted over the stream, so the batch size makes no difference. The images that wait
    for the next update are part of the state.

    Args:
        model: The classifier.
        update_every: Images between two updates; the statistics of these images are the update.
        momentum: Weight of an update in the running statistics.
        bound: How far one update may move the running statistics, in standard deviations: see
            `twoshift.models.norm.bounded_statistics`; None for no bound.
    """

    title = "ONDA"
    reference = (
        "Mancini et al., Kitting in the wild through online domain adaptation, IROS 2018, "
        "https://arxiv.org/abs/1807.01028"
    )

    remembers: ClassVar = {"waiting": None}

    def __init__(
        self,
        model: nn.Module,
        update_every: int = 10,
        momentum: float = 0.1,
        bound: float | None = None,
    ) -> None:
        super().__init__(model)
        require_batch_norm(model)
        # a single image may have no variance
        check_numbers("onda", "a whole number from 2", update_every=update_every)
        check_numbers("the statistics", "from 0 to 1", momentum=momentum)
        self.update_every, self.momentum = update_every, momentum
        self.bound = check_bound("onda", bound)
        self._paced = [] if has_iabn(self.model) else replace_batch_norms(self.model, PacedNorm)
        self._layers = [layer for _, layer in batch_norms(self.model)]
        for layer in self._layers:
            layer.momentum = momentum
        self.ready()

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Scores:
        """Predict every image by the statistics at its point of the stream, and move them."""
        check_keepable(x)
        waiting = of_one_size(self.memory, "waiting", x, self.inputs).get("waiting", x[:0])
        images = torch.cat([waiting, x]) if len(waiting) else x
        end = len(images) // self.update_every * self.update_every  # of the last update
        if self._paced:
            scores = self._at_once(x, in_layout_of(x, images[:end]), len(waiting))
        else:
            scores = self._piece_by_piece(x, waiting)
        rest = images[end:]
        self.memory = {"waiting": rest.clone()} if len(rest) else {}
        return scores

    def check_memory(self, memory: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Fewer images than an update takes."""
        check_stored(self.model, self.inputs, memory, self.remembers, self.update_every - 1)

    def _at_once(self, x: Tensor, due: Tensor, waiting: int) -> Scores:
        """All updates in one pass, then all predictions in another.

        Training mode does not read running statistics, so the updates do not depend on each
        other, and every image can look up the statistics at its point of the stream.
        """
        moment = (torch.arange(len(x), device=x.device) + waiting) // self.update_every
        try:
            for layer in self._paced:
                layer.group, layer.bound, layer.moment = self.update_every, self.bound, None
            if len(due):
                self.model(due)
            for layer in self._paced:
                layer.moment = moment
            return self.predict(x)
        finally:
            for layer in self._paced:
                layer.history = layer.moment = None

    def _piece_by_piece(self, x: Tensor, waiting: Tensor) -> Scores:
        """Predict up to the next update, move the statistics, and so on."""
        scores = []
        for chunk in between_updates(x, len(waiting), self.update_every):
            scores.append(self.predict(chunk))
            waiting = torch.cat([waiting, chunk]) if len(waiting) else chunk
            if len(waiting) == self.update_every:
                with in_training(self._layers), bounded_statistics(self._layers, self.bound):
                    self.model(in_layout_of(x, waiting))
                waiting = x[:0]
        return Scores.cat(scores)


class PacedNorm(AnyBatchNorm):
    """Batch normalisation of several updates, or by statistics after several updates, in one pass.

    Without ``moment`` the input is groups of images, each normalised by its own statistics as in
    training mode; the running statistics move group by group, and ``history`` stores them. With
    ``moment``, the number of updates before each image, each image is normalised by the running
    statistics at that point.
    """

    group = 1
    bound: float | None = None
    moment: Tensor | None = None
    history: tuple[Tensor, Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` of shape (B, C, ...)."""
        self._check_input_dim(input)
        assert self.running_mean is not None
        assert self.running_var is not None
        if self.moment is None:
            return self._follow(input, self.running_mean, self.running_var)
        means, variances = self.history or (self.running_mean[None], self.running_var[None])
        scale = (variances + self.eps).rsqrt()
        scale = scale * self.weight if self.affine else scale
        offset = -means * scale + self.bias if self.affine else -means * scale
        scaled = input * expand(scale[self.moment], input)
        return scaled.add_(expand(offset[self.moment], input))

    def _follow(self, x: Tensor, running_mean: Tensor, running_var: Tensor) -> Tensor:
        groups, spatial = len(x) // self.group, tuple(range(2, x.dim()))

        def over_group(values: Tensor) -> Tensor:
            each = values.mean(spatial) if spatial else values
            return each.view(groups, self.group, -1).mean(1)

        def spread(per_group: Tensor) -> Tensor:
            return expand(per_group.repeat_interleave(self.group, 0), x)

        mean = over_group(x)
        centred = x - spread(mean)
        var = over_group(centred.square())
        count = self.group * x[0, 0].numel()
        self.history = self._moving(running_mean, running_var, mean, var * (count / (count - 1)))
        running_mean.copy_(self.history[0][-1])
        running_var.copy_(self.history[1][-1])
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += groups
        scale = (var + self.eps).rsqrt()
        if not self.affine:
            return centred.mul_(spread(scale))
        return centred.mul_(spread(scale * self.weight)).add_(expand(self.bias[None], x))

    def _moving(
        self, mean: Tensor, var: Tensor, means: Tensor, variances: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Moving averages: their start, and their values after each of the groups."""
        assert self.momentum is not None
        history = [(mean, var)]
        for new_mean, new_var in zip(means, variances, strict=True):
            mean, var = mean.lerp(new_mean, self.momentum), var.lerp(new_var, self.momentum)
            if self.bound is not None:
                step = history[-1], (mean, var)
                mean, var = bounded_step(*step, self.momentum, self.bound, self.eps)
            history.append((mean, var))
        return torch.stack([m for m, _ in history]), torch.stack([v for _, v in history])
