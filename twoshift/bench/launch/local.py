"""Run cells in this process, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twoshift.bench.cell import Cell
from twoshift.bench.launch.base import (
    Claim,
    Outcome,
    Progress,
    pixels_of,
    run_one,
    silent,
    unclaimed,
    weights_of,
)
from twoshift.bench.workshop import Workshop


def launch_local(
    workshop: Workshop,
    cells: Sequence[Cell],
    *,
    progress: Progress = silent,
    claim: Claim = unclaimed,
) -> Iterator[Outcome]:
    """Run cells here, those of one model and one corruption together.

    Args:
        workshop: Finds or trains the models, and keeps the latest in memory.
        cells: The cells to run.
        progress: Called after every batch.
        claim: Asked before a cell is run; where it says no, somebody else runs it.

    Yields:
        Every claimed cell once.
    """
    for cell in sorted(cells, key=lambda cell: (weights_of(cell), pixels_of(cell))):
        if claim(cell):
            yield run_one(workshop, cell, progress)
