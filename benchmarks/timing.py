"""Timing by ratios: candidates take turns, so that a slow moment of the machine slows them all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

REFRESH = 20  # rounds between resets: a collapsed model is slow (denormal numbers)


@dataclass(frozen=True)
class Check:
    """A measured value and the range it must stay in.

    Over rounds, a limit is broken if even the lower quartile is above it: on a busy machine, the
    median of a ratio moves by more than what it should show.

    Attributes:
        name: What was measured.
        value: The measured value.
        low: The lowest value allowed.
        high: The highest value allowed; None for no limit.
        unit: ``x`` for a ratio, otherwise the unit or what is counted.
        spread: The quartiles over the rounds.
    """

    name: str
    value: float
    low: float = 0.0
    high: float | None = None
    unit: str = "x"
    spread: tuple[float, float] | None = None

    @property
    def ok(self) -> bool:
        """Whether the value is in its range."""
        least = self.value if self.spread is None else self.spread[0]
        return self.low <= self.value and (self.high is None or least <= self.high)


class Candidate(NamedTuple):
    """Something to time, and how to reset it to its start."""

    run: Callable[[], object]
    reset: Callable[[], object] = lambda: None


Times = dict[str, list[float]]


def take_turns(
    candidates: dict[str, Candidate], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> Times:
    """The seconds of every candidate in every round; each round starts with another candidate."""
    names, times = list(candidates), {name: list[float]() for name in candidates}
    for i in range(rounds):
        if i % REFRESH == 0:
            for candidate in candidates.values():
                candidate.reset()
                for _ in range(2):  # the optimiser's first step allocates its state
                    candidate.run()
        first = i % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            candidates[name].run()
            times[name].append(clock() - start)
    return times


def ratios(times: Times, name: str, to: str) -> list[float]:
    """The ratio of two candidates in every round."""
    return [a / b for a, b in zip(times[name], times[to], strict=True)]


def timed(what: str, times: Times, name: str, to: str, high: float | None) -> Check:
    """A check of the median ratio of two candidates."""
    low, middle, upper = quantiles(ratios(times, name, to), n=4, method="inclusive")
    return Check(what, middle, high=high, spread=(low, upper))


def milliseconds(what: str, seconds: list[float], high: float | None = None) -> Check:
    """A check of the median of times."""
    low, middle, upper = (1e3 * t for t in quantiles(seconds, n=4, method="inclusive"))
    return Check(what, middle, high=high, unit="ms", spread=(low, upper))


def resident(key: str) -> float:
    """Memory of this process in MB: ``VmRSS`` now, ``VmHWM`` at its peak. Needs Linux.

    ru_maxrss would not do: a new process inherits it from its parent.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith(f"{key}:"))
    return int(kilobytes) / 1024
