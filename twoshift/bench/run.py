"""Run the cells that a store lacks; a failed cell is recorded, and the others still run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from twoshift.bench.cell import Cell
from twoshift.bench.launch.base import Outcome
from twoshift.bench.store import Store
from twoshift.errors import TwoshiftError

Launch = Callable[[Sequence[Cell]], Iterator[Outcome]]


@dataclass
class Summary:
    """How a run ended.

    Attributes:
        done: Number of cells that were measured.
        failed: Cells that could not be measured, with the text of the error.
    """

    done: int = 0
    failed: list[tuple[Cell, str]] = field(default_factory=list)


def missing(cells: Sequence[Cell], store: Store) -> list[Cell]:
    """The cells of which a store has no valid record, each once."""
    known = store.keys()
    by_key = {cell.key: cell for cell in cells}
    return [cell for key, cell in by_key.items() if key not in known]


def run_cells(
    cells: Sequence[Cell],
    store: Store,
    launch: Launch,
    finished: Callable[[Outcome], None] = lambda outcome: None,
) -> Summary:
    """Measure the cells that a store lacks, and store each result at once.

    Args:
        cells: The cells that the store should have.
        store: The store.
        launch: A launcher with its workshop.
        finished: Called after every cell, when its result is stored.
    """
    summary = Summary()
    for outcome in launch(missing(cells, store)):
        error = outcome.error
        if outcome.result is not None:
            try:
                store.put(outcome.result)
            except TwoshiftError as e:  # other weights, for example: other results may still fit
                error = f"{type(e).__name__}: {e}"
        if error is None:
            summary.done += 1
        else:
            store.fail(outcome.cell, error)
            summary.failed.append((outcome.cell, error))
        finished(outcome._replace(error=error))
    return summary
