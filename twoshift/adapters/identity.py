"""An adapter that changes nothing: the control that tells an adapter from what comes with it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from twoshift.adapters.base import Adapter, HeadShift, adapters


@adapters.register("identity")
class IdentityAdapter(Adapter):
    """Attached and conditioned like any other, but the head stays as it is.

    Args:
        features: d, the input size of the head.
        classes: C, the number of classes.
        class_counts: Training images per class, for whoever asks for the degree of imbalance.
    """

    def __init__(
        self, features: int, classes: int, *, class_counts: Sequence[float] | None = None
    ) -> None:
        super().__init__(features, classes, class_counts)

    def forward(self, prior: Tensor) -> HeadShift:
        """No shift."""
        return HeadShift()
