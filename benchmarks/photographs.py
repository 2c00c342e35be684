"""Generated photographs, corrupted: images that are like real ones in what matters to speed."""

from __future__ import annotations

from functools import cache

import numpy as np
from torch import Tensor

from twoshift.data.corruptions import corrupt
from twoshift.data.photographs import photograph
from twoshift.data.stream import to_float

CORRUPTION, SEVERITY = "fog", 5


@cache
def corrupted_batches(count: int, size: int, side: int) -> tuple[Tensor, ...]:
    """Corrupted photographs as a stream gives them: float32, channels last.

    Args:
        count: Number of batches.
        size: Images in each.
        side: Height and width.
    """
    rng = np.random.default_rng(1)
    images = np.stack([photograph(rng, side, side) for _ in range(count * size)])
    return to_float(corrupt(images, CORRUPTION, SEVERITY)).split(size)
