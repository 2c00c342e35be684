"""What a table must say to be shown, and a table of results that belong to none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from twoshift.bench.cell import Cell
from twoshift.bench.result import Result
from twoshift.bench.table import Place
from twoshift.report.tables import row_name


class Layout(Protocol):
    """A table, as far as it is shown; `twoshift.bench.table.Table` is one.

    Attributes:
        rows: Their names; empty if any will do.
        columns: Their names, without the mean; empty if any will do.
        paper: The paper's numbers in percent, by row and column, ``mean`` among the columns.
    """

    @property
    def title(self) -> str: ...  # noqa: D102
    @property
    def rows(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def columns(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def paper(self) -> Mapping[tuple[str, str], float]: ...  # noqa: D102

    def place(self, result: Result, /) -> Place | None:
        """Where a result stands; None if it is not of this table."""

    def paper_cells(self, rows: Sequence[str], /) -> Sequence[Cell]:
        """The cells behind the paper's numbers of some rows."""


@dataclass(frozen=True)
class Everything:
    """Results on a data set that belong to no table of the paper."""

    dataset: str
    clean: bool
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    paper: Mapping[tuple[str, str], float] = field(default_factory=dict)
    _first: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

    @property
    def title(self) -> str:
        """Says which ones."""
        return f"{self.dataset}, {'clean' if self.clean else 'corrupted'} images"

    def place(self, result: Result, /) -> Place:
        """By method and labels; what else differs from the first of that name is told."""
        cell, name = result.cell, row_name(result)
        if cell.method == "source" and result.source.norm:
            name = f"{name} ({result.source.norm.upper()})"
        known = self._first.setdefault(name, _settings(cell))
        others = [f"{k} {v}" for k, v in _settings(cell).items() if known.get(k) != v]
        return Place("", ", ".join([name, *others]), cell.labels)

    def paper_cells(self, rows: Sequence[str], /) -> Sequence[Cell]:
        """The paper has no numbers for these."""
        return ()


def _settings(cell: Cell) -> dict[str, Any]:
    """What may differ between results of one row and column, flat."""
    recipes: dict[str, Any] = {}
    if cell.model is not None:
        recipes |= {f"source {name}": v for name, v in cell.model.source.items()}
        recipes |= {f"adapter {name}": v for name, v in (cell.model.adapter or {}).items()}
    stream = {"severity": cell.severity, "batch_size": cell.batch_size, "order": cell.order}
    return {**recipes, **stream, **cell.settings, **cell.estimator_settings}
