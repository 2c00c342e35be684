"""The paper's figures by name: what each shows is a YAML file, and where its data come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from twoshift.bench.cell import Cell
from twoshift.bench.table import load_table
from twoshift.bench.workshop import Workshop
from twoshift.errors import UnknownName
from twoshift.registry import near_miss


class FigureFile(BaseModel):
    """A figure of the paper.

    Attributes:
        title: Printed above it.
        paper: Which figure of the paper it is.
        draw: The kind of drawing.
        inputs: Settings of that kind.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    paper: str
    draw: str
    inputs: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Desk:
    """What figures are made from.

    Attributes:
        store: File of the results.
        profile: Which results: ``"cpu"`` or ``"paper"``.
        workshop: Finds models and data sets.
    """

    store: Path
    profile: str
    workshop: Workshop

    def cells(
        self, table: str, rows: Sequence[str], corruption: str, shifts: Sequence[str]
    ) -> dict[tuple[str, str], Cell]:
        """Cells of a table for the first seed, by row and labels; or by row and kind of streams.

        Args:
            table: Name of the table.
            rows: Names of rows.
            corruption: The corruption.
            shifts: Names of label distributions; of a table by streams, its columns.
        """
        content = load_table(table)
        only = self.filters(table, rows, corruption, shifts)
        by_place = {}
        for cell in content.cells(self.profile, 1, only):
            shift = content.column_of(cell) if "column" in only else cell.labels
            by_place[content.row_of(cell), shift] = cell
        return {(row, shift): by_place[row, shift] for row in rows for shift in shifts}

    def filters(
        self, table: str, rows: Sequence[str], corruption: str, shifts: Sequence[str]
    ) -> dict[str, Sequence[str]]:
        """What chooses these cells of a table; see `cells`."""
        shift = "column" if load_table(table).by == "streams" else "labels"
        return {"row": rows, "corruption": [corruption], shift: shifts}

    def command(self, table: str, **only: Sequence[str]) -> str:
        """The command that measures what a figure needs."""
        parts = " ".join(f"--only {name}={','.join(values)}" for name, values in only.items())
        return f"twoshift bench {table} --profile {self.profile} {parts} --store {self.store}"


def figure_names() -> list[str]:
    """The figures that come with the package."""
    return sorted(_packaged())


def load_figure(name: str) -> FigureFile:
    """Read what a figure shows."""
    known = _packaged()
    if name not in known:
        raise UnknownName(f"unknown figure {name!r}", cure=near_miss(name, known))
    return FigureFile.model_validate(yaml.safe_load(known[name].read_text()))


def _packaged() -> dict[str, Path]:
    with resources.as_file(resources.files("twoshift.bench") / "figures") as folder:
        return {file.stem: file for file in folder.glob("*.yaml")}
