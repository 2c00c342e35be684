"""Run what a store does not have yet; a failed cell is written down and the rest goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from twoshift.bench.cell import Cell
from twoshift.bench.launch.base import Outcome
from twoshift.bench.result import Result
from twoshift.bench.store import Store
from twoshift.errors import TwoshiftError

Launched = Iterator[Outcome]
Launch = Callable[[Sequence[Cell]], Launched]


@dataclass
class Summary:
    """How a run ended.

    Attributes:
        done: Cells measured in this run.
        failed: Cells that could not be, with the text of the error.
    """

    done: int = 0
    failed: list[tuple[Cell, str]] = field(default_factory=list)


def missing(cells: Sequence[Cell], store: Store) -> list[Cell]:
    """The cells that a store has no valid record of, each once."""
    known = store.keys()
    wanted = {cell.key: cell for cell in cells}
    return [cell for key, cell in wanted.items() if key not in known]


def run_cells(
    cells: Sequence[Cell],
    store: Store,
    launch: Launch,
    finished: Callable[[Outcome], None] = lambda outcome: None,
) -> Summary:
    """Measure what is missing and keep each result as it comes.

    Args:
        cells: What is wanted.
        store: Where results go.
        launch: How cells are run.
        finished: Called after every cell, when its result is safe.
    """
    summary = Summary()
    for outcome in launch(missing(cells, store)):
        error = outcome.error
        if outcome.result is not None:
            error = _put(store, outcome.result)
        if error is None:
            summary.done += 1
        else:
            store.fail(outcome.cell, error)
            summary.failed.append((outcome.cell, error))
        finished(outcome._replace(error=error))
    return summary


def _put(store: Store, result: Result) -> str | None:
    """Keep a result; what speaks against it, if something does."""
    try:
        store.put(result)
    except TwoshiftError as e:  # of other weights, for example: the others may still fit
        return f"{type(e).__name__}: {e}"
    return None
