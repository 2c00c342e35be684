"""Short names and the order of columns: label distributions, corruptions, domains."""

from __future__ import annotations

SHIFTS = ("forward", "backward", "uniform", "permuted")  # label distributions with a short name


def shift_name(labels: str) -> str:
    """A label distribution: forward-50 is F50, uniform U, backward-50 B50."""
    kind, _, ratio = labels.partition("-")
    return kind[0].upper() + ratio


def shift_degree(labels: str) -> float:
    """Where a label distribution stands between forward (negative) and backward (positive)."""
    kind, _, ratio = labels.partition("-")
    return {"forward": -1.0, "backward": 1.0}.get(kind, 0.0) * float(ratio or 0)


def heading(column: str) -> str:
    """A short name of any column: F50 for forward-50, fog for fog."""
    is_shift = column.partition("-")[0] in SHIFTS
    return shift_name(column) if is_shift else column.replace("_", " ")


def degree(column: str) -> tuple[float, str]:
    """For sorting: label shifts from forward to backward, other names by the alphabet."""
    try:
        return shift_degree(column), column
    except ValueError:  # no ratio at its end
        return 0.0, column
