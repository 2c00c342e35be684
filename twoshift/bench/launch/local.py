"""Run cells in this process, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twoshift.bench.cell import Cell
from twoshift.bench.launch.base import Outcome, Progress, pixels_of, run_one, silent, weights_of
from twoshift.bench.workshop import Workshop


def launch_local(
    workshop: Workshop, cells: Sequence[Cell], *, progress: Progress = silent
) -> Iterator[Outcome]:
    """Run cells here, those of one model and one corruption together.

    Args:
        workshop: Finds or trains the models, and keeps the latest in memory.
        cells: The cells to run.
        progress: Called after every batch.

    Yields:
        Every cell once.
    """
    for cell in sorted(cells, key=lambda cell: (weights_of(cell), pixels_of(cell))):
        yield run_one(workshop, cell, progress)
