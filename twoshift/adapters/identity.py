"""An adapter that changes nothing: the control for what an adapter does by itself."""

from __future__ import annotations

from torch import Tensor

from twoshift.adapters.base import Adapter, HeadShift, adapters


@adapters.register("identity")
class IdentityAdapter(Adapter):
    """Attached and conditioned like any other, but the head stays as it is.

    Args:
        features: d, the input size of the head.
        classes: C, the number of classes.
        class_counts: Training images per class (or their shares); only `degree` reads them.
    """

    shifts_only_logits = True

    def forward(self, prior: Tensor) -> HeadShift:
        """No shift."""
        return HeadShift()
