"""Warnings beside numbers: breakdowns that a mean hides, and differences from the paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twoshift import models
from twoshift.bench.cell import CLEAN, IDENTITY, Cell
from twoshift.bench.result import Result
from twoshift.metrics import GROUPS
from twoshift.registry import signature_settings

FALL = 0.1  # loss of accuracy between the first and the last batches that raises an alarm
FAR = 0.4  # error of s, on a scale from -1 to 1, that raises an alarm
HARDLY = 0.05  # recall of a group of classes below which an alarm is raised


def uses_estimate(cell: Cell) -> bool:
    """Whether predictions depend on the label estimate; otherwise it is only recorded."""
    return cell.uses_estimator and cell.adapter != IDENTITY


def alarms(result: Result) -> Iterable[str]:
    """The ways in which a method broke down on a stream."""
    m = result.metrics
    first, last = m["accuracy_first10"], m["accuracy_last10"]
    if first is not None and last is not None and last < first - FALL:
        yield f"accuracy falls by more than {100 * FALL:.0f} points along the stream"
    recalls = {g: m[f"{g}_recall"] for g in GROUPS}
    lost = [g for g, recall in recalls.items() if recall is not None and recall < HARDLY]
    if len(lost) > 1:
        yield f"{' and '.join(lost)} classes are hardly predicted"
    error = m["s_error_final"]
    if uses_estimate(result.cell) and error is not None and abs(error) > FAR:
        side = "head" if error > 0 else "tail"
        yield f"the label estimate ends too far to the {side} (s off by more than {FAR})"


@dataclass
class Conditions:
    """The conditions under which the results of a table were measured.

    Attributes:
        networks: Architecture, width and epochs of training; None for what is not known.
        pixels: Where the corrupted images come from.
        corruptions: The corruptions that were measured.
    """

    networks: set[tuple[Any, Any, Any]] = field(default_factory=set)
    pixels: set[str] = field(default_factory=set)
    corruptions: set[str] = field(default_factory=set)

    def take(self, result: Result) -> None:
        """Add the conditions of a result."""
        cell, source = result.cell, result.source
        epochs = cell.model.source.get("epochs") if cell.model else None
        self.networks.add((source.architecture, source.width, epochs))
        if cell.corruption != CLEAN:
            self.pixels.add(str(result.facts.get("pixels")))
            self.corruptions.add(cell.corruption)

    def notes(self, expected: Sequence[Cell], columns: int, all_columns: int) -> list[str]:
        """The reasons why the results cannot be compared with the paper's.

        Args:
            expected: The cells of the paper's own profile.
            columns: Number of columns that have numbers.
            all_columns: Number of columns of the table.
        """
        recipes = [cell.model.source for cell in expected if cell.model is not None]
        theirs = {(r["architecture"], _width(r), r["epochs"]) for r in recipes}
        notes = []
        for i, name in enumerate(("{}", "width-{} network", "{} epochs of training")):
            paper = {network[i] for network in theirs}
            others = {network[i] for network in self.networks} - paper - {None}
            if paper and others:
                notes.append(f"{name.format(_listed(others))} (paper: {_listed(paper)})")
        if generated := {p for p in self.pixels if not p.startswith("published")}:
            notes.append(f"generated corruptions ({_listed(generated)})")
        corruptions = {cell.corruption for cell in expected} - {CLEAN}
        if missing := corruptions - self.corruptions:
            notes.append(f"{len(corruptions) - len(missing)} of {len(corruptions)} corruptions")
        if columns < all_columns:
            notes.append(f"{columns} of {all_columns} columns (means are over these)")
        return notes


def _width(recipe: Mapping[str, Any]) -> Any:
    known = models.models
    name, settings = recipe["architecture"], recipe["settings"]
    return (signature_settings(known[name]) | settings if name in known else settings).get("width")


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, sorted(values, key=str)))
