"""Timing by ratios: candidates take turns, and what slows the machine slows them all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

REFRESH = 20  # rounds until methods start afresh: a collapsed model is slow (denormal numbers)


@dataclass(frozen=True)
class Check:
    """A measured value and the range it must stay in; without one it is only reported."""

    name: str
    value: float
    low: float = 0.0
    high: float | None = None
    unit: str = "x"  # a ratio; otherwise what is counted
    spread: tuple[float, float] | None = None  # quartiles over the rounds

    @property
    def ok(self) -> bool:
        """Whether the value is in its range."""
        return self.low <= self.value and (self.high is None or self.value <= self.high)


class Candidate(NamedTuple):
    """Something to time, and how to bring it back to where it started."""

    run: Callable[[], object]
    reset: Callable[[], object] = lambda: None


Times = dict[str, list[float]]


def take_turns(
    candidates: dict[str, Candidate], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> Times:
    """Seconds of every candidate in every round; they take turns within a round."""
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


def timed(what: str, times: Times, name: str, to: str, high: float) -> Check:
    """A limit on the median ratio of two candidates."""
    r = ratios(times, name, to)
    low, middle, upper = quantiles(r, n=4, method="inclusive")
    return Check(what, middle, high=high, spread=(low, upper))


def resident(key: str) -> float:
    """Memory of this process in MB: ``VmRSS`` now, ``VmHWM`` at its peak. Needs Linux.

    Not ru_maxrss: a new process inherits it from the one that started it.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith(f"{key}:"))
    return int(kilobytes) / 1024
