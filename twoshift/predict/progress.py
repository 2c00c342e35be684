"""What is shown while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

SHOWN = 3  # of the most frequent classes
Progress = Callable[[int, int, str], None]  # images done, all images, and what else is known


def silent(done: int, total: int, facts: str = "") -> None:
    """Show nothing."""


def facts_of(prior: Tensor | None, classes: Sequence[str]) -> str:
    """The most frequent labels by the present estimate: ``cat 41%, dog 22%``."""
    if prior is None:
        return ""
    most = prior.topk(min(SHOWN, len(classes)))
    pairs = zip(most.indices.tolist(), most.values.tolist(), strict=True)
    return ", ".join(f"{classes[c]} {share:.0%}" for c, share in pairs)


class Pace:
    """Adds the images per second to what is shown.

    Args:
        show: Shows it.
    """

    def __init__(self, show: Progress) -> None:
        self._show = show
        self._start: tuple[float, int] | None = None

    def __call__(self, done: int, total: int, facts: str = "") -> None:
        """Show how far a run is."""
        now = time.monotonic()
        if self._start is None:
            self._start = now, done
        seconds, images = now - self._start[0], done - self._start[1]
        pace = f"{images / seconds:,.0f} images/s" if seconds > 0 and images else ""
        self._show(done, total, "  ".join(filter(None, (pace, facts))))
