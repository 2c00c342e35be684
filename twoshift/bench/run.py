"""Run the cells that a store lacks; a failed cell is recorded, and the others still run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from twoshift.bench.cell import Cell
from twoshift.bench.claims import Claims
from twoshift.bench.launch.base import Outcome
from twoshift.bench.store import Store
from twoshift.errors import TwoshiftError

Launch = Callable[..., Iterator[Outcome]]
PAUSE = 2.0  # seconds between two looks at what others have measured


@dataclass
class Summary:
    """How a run ended.

    Attributes:
        done: Number of cells that were measured.
        failed: Cells that could not be measured, with the text of the error.
        elsewhere: Number of cells that another process measured meanwhile.
    """

    done: int = 0
    failed: list[tuple[Cell, str]] = field(default_factory=list)
    elsewhere: int = 0


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
    waiting: Callable[[int], None] = lambda cells: None,
) -> Summary:
    """Measure the cells that a store lacks, and store each result at once.

    Cells that another process measures are left to it, and taken over if it dies.

    Args:
        cells: The cells that the store should have.
        store: The store.
        launch: A launcher with its workshop; takes cells and ``claim``.
        finished: Called after every cell, when its result is stored.
        waiting: Called now and then with the number of cells that only others still measure.
    """
    summary, old = Summary(), _failures(store).keys()
    left = {cell.key: cell for cell in missing(cells, store)}
    with Claims(store) as claims:
        while left:
            for key in [key for key in left if key in store]:
                del left[key]
                summary.elsewhere += 1
            for (key, _), error in _failures(store, but=old).items():
                if key in left:  # it failed elsewhere, and would here
                    summary.failed.append((left.pop(key), error))
            free, refused = claims.free([*left.values()]), set[str]()

            def claim(cell: Cell, refused: set[str] = refused) -> bool:
                if claims.take(cell):
                    return True
                refused.add(cell.key)
                return False

            for outcome in launch(free, claim=claim) if free else ():
                finished(_stored(outcome, store, summary))
            for key in {cell.key for cell in free} - refused:
                del left[key]
            if elsewhere := sum(key not in store for key in left):
                waiting(elsewhere)
                time.sleep(PAUSE)
    return summary


def _failures(store: Store, but: Collection[tuple[str, str]] = ()) -> dict[tuple[str, str], str]:
    """The errors of failed cells, by key and time."""
    return {(f.key, f.time): f.error for f in store.failures() if (f.key, f.time) not in but}


def _stored(outcome: Outcome, store: Store, summary: Summary) -> Outcome:
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
    return outcome._replace(error=error)
