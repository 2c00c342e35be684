"""Run many cases of a part of the fuzz suite in processes that may die.

A part is a module with a function ``prepare(folder)``, which returns a function that tries one case
and returns how often what happened. A case that raises, ends the process, takes too long or too
much memory is a problem; it is noted with the command that repeats it, and the next case follows.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import random
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Case = Callable[[random.Random, int], Counter[str]]
MEMORY = 2 << 30  # bytes that a worker may take beside what it has when it is prepared
PATIENCE = 120.0  # seconds for one case, on a busy machine
RENEWED = 4000  # cases after which a worker is replaced
SHOWN = 1500  # characters of a problem


@dataclass
class Report:
    """What happened in all cases of a part.

    Attributes:
        counts: How often what happened.
        problems: What must not happen, each with the command that repeats it.
        seconds: How long it took.
    """

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run(part: str, count: int, seed: int, *, patience: float = PATIENCE) -> Report:
    """Try ``count`` cases of a part, in one worker at a time.

    Args:
        part: Name of its module.
        count: How many cases.
        seed: Seed of all of them.
        patience: Longest time for a case, in seconds; preparing may take three times as long.
    """
    report, start, first = Report(), time.monotonic(), 0
    while first < count:
        first = _one_worker(part, first, min(count, first + RENEWED), seed, patience, report)
    report.seconds = time.monotonic() - start
    return report


def _one_worker(part: str, first: int, end: int, seed: int, patience: float, report: Report) -> int:
    """Try cases from ``first`` until ``end`` or until the worker dies; returns the next case."""
    command = [sys.executable, "-m", "tests.fuzz.workers", part, str(first), str(end), str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        environment["TMPDIR"] = folder  # cleared here, since the worker may not live to do it
        late, done = False, first - 1
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT, env=environment
        ) as worker:
            for line in _lines(worker, patience):
                said = json.loads(line)
                done = said["case"]
                report.counts.update(said["counts"])
                if "problem" in said:
                    report.problems.append(_repeat(part, done, seed) + said["problem"])
            if late := not _ends(worker):
                worker.kill()
        if worker.returncode == 0:
            return end
        errors.seek(0)
        what = f"ended the process with {worker.returncode}"
        what = f"took more than {patience:g} s" if late else what
        report.counts["hangs" if late else "crashes"] += 1
        report.problems.append(f"{_repeat(part, done + 1, seed)}{what}\n{errors.read()[-SHOWN:]}")
        return done + 2  # past the one that did it


def _repeat(part: str, case: int, seed: int) -> str:
    return f"python -m tests.fuzz.workers {part} {case} {case + 1} {seed}: "


def _lines(worker: subprocess.Popen[bytes], patience: float) -> Iterator[bytes]:
    """Lines that a worker writes, until its end or until one takes too long."""
    assert worker.stdout is not None
    rest, allowed = b"", 3 * patience
    while select.select([worker.stdout], [], [], allowed)[0]:
        allowed = patience
        if not (read := os.read(worker.stdout.fileno(), 1 << 16)):
            return
        *lines, rest = (rest + read).split(b"\n")
        yield from lines


def _ends(worker: subprocess.Popen[bytes]) -> bool:
    """Whether a worker that has closed its output comes to an end."""
    assert worker.stdout is not None
    if not select.select([worker.stdout], [], [], 0)[0]:
        return False  # not closed: it is still at work
    try:
        worker.wait(60)
    except subprocess.TimeoutExpired:
        return False
    return True


def work(
    part: str,
    first: int,
    end: int,
    seed: int,
    say: Callable[[dict[str, Any]], None],
    when_prepared: Callable[[], None] = lambda: None,
) -> None:
    """Try the cases from ``first`` to ``end``, in this process."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try_one: Case = importlib.import_module(f"tests.fuzz.{part}").prepare(Path(folder))
        gc.freeze()  # what was prepared stays
        when_prepared()
        for case in range(first, end):
            say({"case": case, **_tried(try_one, case, seed)})


def _tried(try_one: Case, case: int, seed: int) -> dict[str, Any]:
    try:
        return {"counts": try_one(random.Random(f"{seed} {case}"), case)}
    except Exception:
        return {"counts": {"problems": 1}, "problem": traceback.format_exc()[-SHOWN:]}


def in_process(part: str, count: int, seed: int) -> Report:
    """As `run`, but in this process: it begins sooner, and a crash ends it."""
    report = Report()

    def say(said: dict[str, Any]) -> None:
        report.counts.update(said["counts"])
        if "problem" in said:
            report.problems.append(_repeat(part, said["case"], seed) + said["problem"])

    work(part, 0, count, seed, say)
    return report


def main(part: str, first: int, end: int, seed: int) -> None:
    """What a worker does."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anything else prints is not mistaken for a line of ours

    def say(said: dict[str, Any]) -> None:
        lines.write(json.dumps(said) + "\n")

    work(part, first, end, seed, say, _limit_memory)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])  # of address space, taken so far
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    part, *numbers = sys.argv[1:]
    main(part, *map(int, numbers))
