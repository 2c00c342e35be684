"""How numbers are written in tables, pages and plots."""

from __future__ import annotations

Interval = tuple[float, float] | None


def decimal(value: float | None, digits: int = 1, sign: bool = False) -> str:
    """``47.1``, or with a sign ``+47.1``; nothing where there is no number."""
    return "" if value is None else f"{value:{'+' if sign else ''}.{digits}f}"


def with_interval(value: float, interval: Interval, digits: int = 1, sign: bool = False) -> str:
    """``47.1 [45.0, 49.2]``; only the number where there is no interval."""
    text = decimal(value, digits, sign)
    if interval is None:
        return text
    low, high = (decimal(end, digits, sign) for end in interval)
    return f"{text} [{low}, {high}]"


def typographic(value: float) -> str:
    """With a sign, and a minus that is as wide as a plus."""
    return decimal(value, sign=True).replace("-", "−")
