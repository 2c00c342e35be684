"""Images that are looked at together: what is read of a block costs the same for any batch size."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LOOKED_AT = 16  # images of a block whose pixels are looked at


class Gathered(NamedTuple):
    """A block.

    Attributes:
        images: Number of them.
        some: Up to about 16 of them, evenly spaced.
        places: Which ones these are.
        logits: What was predicted for all of them, (images, C); None if nothing was.
    """

    images: int
    some: Tensor
    places: NDArray[np.int64]
    logits: NDArray[np.float64] | None


class Block:
    """Batches that wait until there are enough images.

    Args:
        size: Number of images that are enough.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.clear()

    def clear(self) -> None:
        """Forget what waits."""
        self._count = 0
        self._some: list[Tensor] = []
        self._places: list[NDArray[np.int64]] = []
        self._logits: list[Tensor] = []
        self._predicted = True

    def __len__(self) -> int:
        """Number of images that wait."""
        return self._count

    @property
    def full(self) -> bool:
        """Whether there are enough."""
        return self._count >= self.size

    def fits(self, x: Tensor, logits: Tensor | None) -> bool:
        """Whether a batch can wait with the others: images of the same kind, predicted as they."""
        if not self._count:
            return True
        like, predicted = self._some[0], logits is not None
        same = (x.shape[1:], x.dtype, x.device) == (like.shape[1:], like.dtype, like.device)
        return same and predicted == self._predicted

    def add(self, x: Tensor, logits: Tensor | None) -> None:
        """Let a batch wait; only some of its images are kept."""
        step = max(1, max(self.size, len(x)) // LOOKED_AT)
        places = np.arange(-self._count % step, len(x), step)
        if len(places):
            # a copy: the caller may write the next batch into the same memory
            self._some.append(x.detach()[torch.from_numpy(places).to(x.device)])
            self._places.append(places + self._count)
        if logits is not None:
            self._logits.append(logits.detach())
        self._predicted = logits is not None
        self._count += len(x)

    def take(self) -> Gathered:
        """The block, which begins anew."""
        logits = torch.cat(self._logits).cpu().double().numpy() if self._logits else None
        some, places = torch.cat(self._some), np.concatenate(self._places)
        found = Gathered(self._count, some, places, logits)
        self.clear()
        return found
