"""One small network for all classes, which can follow any label distribution, not only a tilt."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from twoshift.adapters.base import FLOOR, HeadShift, adapters
from twoshift.adapters.label_shift import network, spread_evenly
from twoshift.adapters.logit import LogitAdapter
from twoshift.registry import check_choice


@adapters.register("classwise")
class ClasswiseAdapter(LogitAdapter):
    """Reads (log pi_c, log pi_s,c) of each class with one network and shifts that class's logit.

    It treats all classes alike, so it can handle any permutation of the labels. A fresh one is
    logit adjustment: db = log pi.

    Args:
        features: d, the input size of the head.
        classes: C, the number of classes.
        class_counts: Training images per class (or their shares).
        assumes: The label distribution that the head's logits contain; uniform by default, which
            is right after balanced softmax. Plain cross-entropy leaves that of the training images.
        dw: Form of dW: ``"class"`` (one number per class, spread evenly over the features) or
            ``"none"``.
        hidden: Size of the hidden layer.
    """

    needs_training = True
    source_log: Tensor

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        class_counts: Sequence[float] | None = None,
        assumes: Sequence[float] | None = None,
        dw: str = "class",
        hidden: int = 100,
    ) -> None:
        super().__init__(features, classes, class_counts=class_counts, assumes=assumes)
        check_choice("the adapter", ("class", "none"), dw=dw)
        self.dw, self.hidden = dw, hidden
        counts = torch.tensor(self.counts())
        centred = (counts / counts.mean()).clamp_min(FLOOR).log()
        self.register_buffer("source_log", centred, persistent=False)
        self._sizes = [int(dw == "class"), 1]
        self.head_net = network(2, hidden, sum(self._sizes))

    def forward(self, prior: Tensor) -> HeadShift:
        """Shifts of the weights and biases of every class, from the same network."""
        logs = prior.clamp_min(FLOOR).log()
        inputs = torch.stack([logs + math.log(self.classes), self.source_log], 1)
        assert self.head_net is not None
        weight, bias = self.head_net(inputs).split(self._sizes, 1)
        return HeadShift(
            weight=spread_evenly(weight.squeeze(1), self.features) if self.dw == "class" else None,
            bias=logs - self.assumed_log + bias.squeeze(1),
        )
