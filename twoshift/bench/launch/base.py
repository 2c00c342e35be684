"""What all launchers share."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from twoshift.bench.cell import TRAINED, Cell
from twoshift.bench.result import Result
from twoshift.bench.workshop import Workshop

Progress = Callable[[Cell, int, int], None]
Claim = Callable[[Cell], bool]
Pixels = tuple[str, str, str, str, int]


class Outcome(NamedTuple):
    """How a cell ended.

    Attributes:
        cell: The cell.
        result: Its result; None where it failed.
        error: The traceback of its failure; None where it succeeded.
    """

    cell: Cell
    result: Result | None
    error: str | None


def silent(cell: Cell, done: int, total: int) -> None:
    """Report no progress."""


def unclaimed(cell: Cell) -> bool:
    """Nobody else measures any cell."""
    return True


def run_one(workshop: Workshop, cell: Cell, progress: Progress = silent) -> Outcome:
    """Run a cell; an error becomes its outcome."""
    return attempt(cell, lambda: workshop.run(cell, partial(progress, cell)))


def attempt(cell: Cell, run: Callable[[], Result]) -> Outcome:
    """Run, and turn any error into an outcome; Ctrl-C still ends the program."""
    try:
        return Outcome(cell, run(), None)
    except Exception:
        return Outcome(cell, None, traceback.format_exc())


def weights_of(cell: Cell) -> str:
    """Name of the source model of a cell: cells of one model are run together."""
    return "" if cell.model is None else cell.model.source_key


def adapter_of(cell: Cell) -> str | None:
    """Name of the trained adapter of a cell; None where it uses none."""
    if cell.model is None or cell.model.adapter is None or cell.adapter != TRAINED:
        return None
    return cell.model.adapter_key


def pixels_of(cell: Cell) -> Pixels:
    """Names the test images of a cell: their pixels, and the numbering of their classes."""
    source = {} if cell.model is None else cell.model.source
    own, decoding = source.get("dataset", ""), str(source.get("decoding"))
    return cell.target or own, own, decoding, cell.corruption, cell.severity


def seldom(report: Callable[[int, int], None], seconds: float = 0.2) -> Callable[[int, int], None]:
    """Report now and then, and at the end: a message per batch may cost more than the batch.

    Args:
        report: Called with the number of batches done and of all batches.
        seconds: Least time between two reports.
    """
    last = 0.0

    def report_seldom(done: int, total: int) -> None:
        nonlocal last
        if done == total or time.monotonic() - last >= seconds:
            last = time.monotonic()
            report(done, total)

    return report_seldom
