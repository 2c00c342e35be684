"""The paper's figures by name: what each shows is YAML beside the tables, how is in `draw`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from twoshift import priors
from twoshift.bench.cell import TRAINED, Cell
from twoshift.bench.embed import stream_features, tsne, tsne_package
from twoshift.bench.store import Store
from twoshift.bench.table import load_table
from twoshift.bench.toy import train_boundaries
from twoshift.bench.workshop import Workshop
from twoshift.data._lists import list_counts
from twoshift.data.base import data_root
from twoshift.data.label_shift import wanted_counts
from twoshift.data.long_tail import class_counts
from twoshift.errors import InputError, ModelError, UnknownName
from twoshift.metrics import accuracy as share_right
from twoshift.registry import check_settings, near_miss
from twoshift.report import draw
from twoshift.report.tables import Entry, Grid, grid

PREFIX = "figure-"
Counts = NDArray[np.int64]


class FigureFile(BaseModel):
    """A figure of the paper.

    Attributes:
        kind: What tells the file from a table.
        title: Printed above it.
        paper: Which figure of the paper it is.
        draw: How it is made: a name in `MAKERS`.
        inputs: Settings of that function.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["figure"]
    title: str
    paper: str
    draw: str
    inputs: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Desk:
    """What figures are made from.

    Attributes:
        store: Results.
        profile: Which ones: ``"cpu"`` or ``"paper"``.
        workshop: Finds models and data sets.
    """

    store: Path
    profile: str
    workshop: Workshop


def figure_names() -> list[str]:
    """The figures that come with the package."""
    return sorted(_packaged())


def load_figure(name: str) -> FigureFile:
    """What a figure shows."""
    known = _packaged()
    if name not in known:
        raise UnknownName(f"unknown figure {name!r}", cure=near_miss(name, known))
    content = FigureFile.model_validate(yaml.safe_load(known[name].read_text()))
    check_settings(f"figure {name!r}", MAKERS[content.draw], content.inputs)
    return content


def make_figure(name: str, out: Path, desk: Desk) -> None:
    """Make a figure and write it as SVG or PNG."""
    content = load_figure(name)
    draw.check_format(out)
    draw.save(MAKERS[content.draw](desk, content.title, **content.inputs), out)


def _packaged() -> dict[str, Path]:
    with resources.as_file(resources.files("twoshift.bench") / "tables") as folder:
        return {f.stem.removeprefix(PREFIX): f for f in folder.glob(f"{PREFIX}*.yaml")}


def accuracy(desk: Desk, title: str, *, table: str, rows: Sequence[str]) -> Any:
    """Accuracy against the degree of label shift, ours beside the paper's."""
    chosen = load_table(table)
    found = []
    with Store(desk.store, create=False) as store:
        for result in store.results():
            place = chosen.place(result)
            if place and place.profile == desk.profile and place.row in rows:
                found.append(result)
    if not found:
        raise InputError(
            f"results for {table} ({desk.profile}) in {desk.store}",
            must_be="there",
            cure=_bench(desk, table, row=rows),
        )
    ours = grid(found, row=chosen.row_of)
    paper: Grid = {
        row: {
            c: Entry((chosen.paper[row, c] / 100,))
            for c in chosen.columns
            if (row, c) in chosen.paper
        }
        for row in rows
    }
    source = found[0].source
    corruptions = sorted({r.cell.corruption for r in found})
    streams = corruptions[0] if len(corruptions) == 1 else f"{len(corruptions)} corruptions"
    here = f"measured: {source.architecture}, width {source.width}, {streams}"
    ordered = {row: ours[row] for row in rows if row in ours}
    return draw.accuracy({here: ordered, "paper: 15 corruptions": paper}, title)


def labels(
    desk: Desk,
    title: str,
    *,
    long_tailed: Mapping[str, Mapping[str, int]],
    shifts: Sequence[str],
    lists: Mapping[str, Mapping[str, str]],
) -> Any:
    """Label distributions of the data sets; those that come as lists where the lists are."""
    panels = {name: long_tail(shifts=shifts, **facts) for name, facts in long_tailed.items()}
    folder = data_root(desk.workshop.data) / "lists"
    absent = []
    for name, files in lists.items():
        paths = {split: folder / file for split, file in files.items()}
        if all(path.exists() for path in paths.values()):
            panels[name] = counts_of_lists(paths)
        else:
            absent.append(name)
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
        ratio: Of the long-tailed subset.
        shifts: Names of the streams' label distributions.
    """
    streams = {name: wanted_counts(priors.named(name, classes), test) for name in shifts}
    return {"training": class_counts("exponential", train, classes, ratio), **streams}


def counts_of_lists(paths: Mapping[str, Path]) -> dict[str, Counts]:
    """Images per class of list files, all of as many classes."""
    found = {split: list_counts(path) for split, path in paths.items()}
    classes = max(map(len, found.values()))
    return {split: np.pad(counts, (0, classes - len(counts))) for split, counts in found.items()}


def estimate(
    desk: Desk, title: str, *, table: str, rows: Sequence[str], corruption: str, shifts: list[str]
) -> Any:
    """Estimated against true label distribution, with and without the adapter."""
    cells = _cells(desk, table, rows, corruption, shifts)
    with Store(desk.store, create=False) as store:
        stored = {place: store.get(cell.key) for place, cell in cells.items()}
    results = {place: result for place, result in stored.items() if result is not None}
    if missing := len(stored) - len(results):
        raise InputError(
            f"{missing} of {len(stored)} results of the figure are not in {desk.store}",
            cure=_bench(desk, table, row=rows, corruption=[corruption], labels=shifts),
        )
    runs = {y: {row: results[row, y].trace or {} for row in rows} for y in shifts}
    classes = len(runs[shifts[0]][rows[0]]["true_prior"])
    falling = range(classes, 0, -1)  # long-tailed subsets keep most of class 0, least of the last
    return draw.estimates(runs, falling, title)


def boundary(desk: Desk, title: str, *, taus: Sequence[float], seed: int = 0) -> Any:
    """Decision boundary against tau, on a toy problem that is trained now."""
    return draw.boundaries(train_boundaries(taus, seed), title)


def features(
    desk: Desk,
    title: str,
    *,
    table: str,
    rows: Sequence[str],
    corruption: str,
    shift: str,
    images: int,
) -> Any:
    """Maps (t-SNE) of the features of adapted models, over the last images of a stream."""
    tsne_package()  # before minutes of adapting
    cells = _cells(desk, table, rows, corruption, [shift])
    works, panels, classes = desk.workshop, {}, list[str]()
    for cell in cells.values():
        assert cell.model is not None
        if works.missing(cell.model, cell.adapter == TRAINED):
            raise ModelError(
                f"the models of the figure are not in {works.models}",
                cure=_bench(desk, table, row=rows, corruption=[corruption], labels=[shift]),
            )
    for (row, _), cell in cells.items():
        assert cell.model is not None
        source = works.source(cell.model)
        adapter = works.adapter(cell.model) if cell.adapter == TRAINED else None
        seen = stream_features(cell, source, adapter, works.images)
        right = 100 * share_right(seen.predicted[-images:], seen.labels[-images:])
        name = f"{row}: {right:.1f} % right in the last {len(seen.labels[-images:]):,} images"
        panels[name] = tsne(seen.features[-images:]), seen.labels[-images:]
        classes = source.card.classes
    return draw.maps(panels, classes, title)


MAKERS: dict[str, Callable[..., Any]] = {
    "accuracy": accuracy,
    "labels": labels,
    "estimate": estimate,
    "boundary": boundary,
    "features": features,
}


def _cells(
    desk: Desk, table: str, rows: Sequence[str], corruption: str, shifts: Sequence[str]
) -> dict[tuple[str, str], Cell]:
    """The cells of the first seed, by row and labels."""
    chosen = load_table(table)
    only = {"row": rows, "corruption": [corruption], "labels": shifts}
    cells = chosen.cells(desk.profile, 1, only)
    found = {(chosen.row_of(cell), cell.labels): cell for cell in cells}
    return {(row, y): found[row, y] for row in rows for y in shifts}


def _bench(desk: Desk, table: str, **only: Sequence[str]) -> str:
    """The command that makes what is missing."""
    chosen = " ".join(f"--only {name}={','.join(values)}" for name, values in only.items())
    return f"twoshift bench {table} --profile {desk.profile} {chosen} --store {desk.store}"
