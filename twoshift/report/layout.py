"""What a table must provide to be shown, and a table for results that belong to no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from twoshift.bench.cell import Cell
from twoshift.bench.result import Result
from twoshift.bench.table import Place
from twoshift.report.tables import row_name


class Layout(Protocol):
    """What is shown of a table; `twoshift.bench.table.Table` has it.

    Attributes:
        title: What the table is about.
        rows: Names of the rows; empty if it takes any.
        columns: Names of the columns, without the mean; empty if it takes any.
        paper: The paper's numbers in percent, by row and column, including the column ``mean``.
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
        """The place of a result; None if it is not in this table."""

    def paper_cells(self, rows: Sequence[str], /) -> Sequence[Cell]:
        """The cells behind the paper's numbers of some rows."""


@dataclass(frozen=True)
class OtherResults:
    """A table of the results on a data set that belong to no other table."""

    dataset: str
    clean: bool
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    paper: Mapping[tuple[str, str], float] = field(default_factory=dict)
    _first: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

    @property
    def title(self) -> str:
        """Data set and kind of images."""
        return f"{self.dataset}, {'clean' if self.clean else 'corrupted'} images"

    def place(self, result: Result, /) -> Place:
        """By method and labels; the row also names settings that differ from its first result."""
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
    """All settings that may differ between results of one row and column."""
    recipes: dict[str, Any] = {}
    if cell.model is not None:
        recipes |= {f"source {name}": v for name, v in cell.model.source.items()}
        recipes |= {f"adapter {name}": v for name, v in (cell.model.adapter or {}).items()}
    stream = {"severity": cell.severity, "batch_size": cell.batch_size, "order": cell.order}
    stream |= {"images": cell.images or "all"}
    return {**recipes, **stream, **cell.settings, **cell.estimator_settings}
