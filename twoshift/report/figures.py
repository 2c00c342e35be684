"""Figures of what was measured: from results of a store, or lists of labels, to drawings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from twoshift import priors
from twoshift.bench.store import Store
from twoshift.bench.table import load_table
from twoshift.data._lists import list_counts
from twoshift.data.base import data_root
from twoshift.data.label_shift import wanted_counts
from twoshift.data.long_tail import class_counts
from twoshift.errors import InputError
from twoshift.report import draw
from twoshift.report.tables import Entry, Grid, grid

if TYPE_CHECKING:
    from twoshift.bench.figure_file import Desk

Counts = NDArray[np.int64]


def accuracy(desk: Desk, title: str, *, table: str, rows: Sequence[str]) -> Any:
    """Accuracy against the degree of label shift, or by kind of streams; beside the paper's."""
    content = load_table(table)
    results = []
    with Store(desk.store, create=False) as store:
        for result in store.results():
            place = content.place(result)
            if place and place.profile == desk.profile and place.row in rows:
                results.append(result)
    if not results:
        raise InputError(
            f"results for {table} ({desk.profile}) in {desk.store}",
            must_be="there",
            cure=desk.command(table, row=rows),
        )
    ours = grid(results, row=content.row_of)
    if content.by == "streams":
        results.sort(key=lambda result: content.columns.index(content.column_of(result)))
        ours = grid(results, row=content.row_of, column=content.column_of)
    paper: Grid = {
        row: {
            c: Entry((content.paper[row, c] / 100,))
            for c in content.columns
            if (row, c) in content.paper
        }
        for row in rows
    }
    source = results[0].source
    corruptions = sorted({r.cell.corruption for r in results})
    streams = corruptions[0] if len(corruptions) == 1 else f"{len(corruptions)} corruptions"
    here = f"measured: {source.architecture}, width {source.width}, {streams}"
    with_results = {row: ours[row] for row in rows if row in ours}
    panels = {here: with_results, "paper: 15 corruptions": paper}
    return draw.accuracy(panels if content.paper else {here: with_results}, title)


def labels(
    desk: Desk,
    title: str,
    *,
    long_tailed: Mapping[str, Mapping[str, int]],
    shifts: Sequence[str],
    lists: Mapping[str, Mapping[str, str]],
) -> Any:
    """Label distributions of the data sets; of sets that come as lists, where the lists exist."""
    panels = {name: long_tail(shifts=shifts, **facts) for name, facts in long_tailed.items()}
    folder = data_root(desk.workshop.data) / "lists"
    for name, files in lists.items():
        paths = {split: folder / file for split, file in files.items()}
        if all(path.exists() for path in paths.values()):
            panels[name] = counts_of_lists(paths)
    absent = [name for name in lists if name not in panels]
    note = f"Without {', '.join(absent)}: no lists in the data folder." if absent else ""
    return draw.distributions(panels, title, note)


def long_tail(
    *, classes: int, train: int, test: int, ratio: float, shifts: Sequence[str]
) -> dict[str, Counts]:
    """Images per class of a long-tailed training set and of the test streams.

    Args:
        classes: Number of classes.
        train: Images per class in the balanced training set.
        test: Images per class in the test set.
        ratio: Imbalance ratio of the long-tailed subset.
        shifts: Names of the streams' label distributions.
    """
    streams = {name: wanted_counts(priors.named(name, classes), test) for name in shifts}
    return {"training": class_counts("exponential", train, classes, ratio), **streams}


def counts_of_lists(paths: Mapping[str, Path]) -> dict[str, Counts]:
    """Images per class in list files, by split; all splits get the same number of classes."""
    by_split = {split: list_counts(path) for split, path in paths.items()}
    classes = max(map(len, by_split.values()))
    return {split: np.pad(counts, (0, classes - len(counts))) for split, counts in by_split.items()}


def estimate(
    desk: Desk, title: str, *, table: str, rows: Sequence[str], corruption: str, shifts: list[str]
) -> Any:
    """Estimated against true label distribution, with and without the adapter."""
    cells = desk.cells(table, rows, corruption, shifts)
    with Store(desk.store, create=False) as store:
        stored = {place: store.get(cell.key) for place, cell in cells.items()}
    results = {place: result for place, result in stored.items() if result is not None}
    if missing := len(stored) - len(results):
        raise InputError(
            f"{missing} of {len(stored)} results of the figure are not in {desk.store}",
            cure=desk.command(table, **desk.filters(table, rows, corruption, shifts)),
        )
    runs = {y: {row: results[row, y].trace or {} for row in rows} for y in shifts}
    classes = len(runs[shifts[0]][rows[0]]["true_prior"])
    falling = range(classes, 0, -1)  # long-tailed subsets keep most of class 0, least of the last
    return draw.estimates(runs, falling, title)
