"""What is known about a classifier's images: their size, and the range of their pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from twoshift.errors import BatchError, SettingError


@dataclass(frozen=True)
class Inputs:
    """Facts about the images that a classifier takes; what is None is not known.

    A batch of another size is refused, and so is one far outside of the range of pixels: more than
    the whole range below or above it.

    Args:
        channels: Number of channels.
        size: Height and width.
        low: Smallest pixel that was seen.
        high: Largest pixel that was seen.
    """

    channels: int | None = None
    size: tuple[int, int] | None = None
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        sizes = () if self.size is None else self.size
        if not isinstance(sizes, tuple | list) or len(sizes) not in (0, 2):
            raise SettingError("size of the images", must_be="(height, width)", got=repr(self.size))
        channels = () if self.channels is None else (self.channels,)
        for number in (*channels, *sizes):
            if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
                must_be = "whole numbers from 1"
                raise SettingError("channels and size of the images", must_be=must_be, got=number)
        if self.size is not None:
            object.__setattr__(self, "size", tuple(int(n) for n in sizes))
        limits = (self.low, self.high)
        if limits != (None, None) and not (
            all(isinstance(n, Real) and math.isfinite(n) for n in limits) and limits[0] < limits[1]  # type: ignore[operator]
        ):
            must_be = "finite, both or neither, low below high"
            raise SettingError("low and high of the pixels", must_be=must_be, got=limits)

    def check(self, x: Tensor, low: float, high: float) -> None:
        """Refuse a batch of another size, or with pixels far outside of the range.

        Args:
            x: The batch.
            low: Its smallest value.
            high: Its largest value.
        """
        wanted = (self.channels, *(self.size or (None, None)))
        fits = x.dim() == 4 and all(
            n is None or n == m for n, m in zip(wanted, x.shape[1:], strict=True)
        )
        if wanted != (None,) * 3 and not fits:
            names = [str(n or name) for n, name in zip(wanted, "CHW", strict=True)]
            raise BatchError("a batch", must_be=f"(B, {', '.join(names)})", got=f"{tuple(x.shape)}")
        if self.low is None or self.high is None:
            return
        span = self.high - self.low
        if low < self.low - span or high > self.high + span:
            raise BatchError(
                f"a batch has pixels from {low:.4g} to {high:.4g} where the calibration saw "
                f"{self.low:.4g} to {self.high:.4g}",
                cure=self._cure(low, high),
            )

    def _cure(self, low: float, high: float) -> str:
        assert self.high is not None
        if self.high <= 1 and low >= 0 and 1 < high <= 255:
            return "Divide by 255."
        return "Prepare the images as for the calibration."

    def card(self) -> dict[str, Any]:
        """The facts for a card."""
        size = None if self.size is None else list(self.size)
        return {"channels": self.channels, "size": size, "low": self.low, "high": self.high}

    @classmethod
    def of_card(cls, card: dict[str, Any]) -> Inputs:
        """The facts that a card holds."""
        if not isinstance(card, dict):
            raise SettingError("inputs of a card", must_be="a dictionary", got=repr(card))
        size = card.get("size")
        size = tuple(size) if isinstance(size, list) else size
        return cls(card.get("channels"), size, card.get("low"), card.get("high"))
