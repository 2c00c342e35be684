"""Tables of results: what to measure as YAML, the paper's numbers as CSV beside it.

``load_table("table1-cifar10").cells("cpu")`` needs neither data nor weights. A YAML file of one's
own is loaded by its path; the numbers to compare with are in a CSV file of the same name.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from twoshift import estimators
from twoshift.bench.cell import CLEAN, Cell
from twoshift.bench.cost import COLUMNS, cost
from twoshift.bench.plan import Plan, plans_of
from twoshift.bench.result import Result
from twoshift.bench.table_file import TableFile, explained, full_name
from twoshift.errors import SettingError, UnknownName
from twoshift.registry import near_miss
from twoshift.train._yaml import read_yaml

PAPER = "paper"  # the profile of the paper's own numbers
MEAN = "mean"  # the column of averages, in the paper's numbers
FILTERS = (
    "row",
    "group",
    "column",
    "method",
    "norm",
    "adapter",
    "estimator",
    "corruption",
    "labels",
)
Measurable = Cell | Result


class Place(NamedTuple):
    """The place of a cell in a table."""

    profile: str
    row: str
    column: str


class _PlannedStream(NamedTuple):
    plan: Plan
    corruption: str
    labels: str


@dataclass(frozen=True)
class Table:
    """A table of the paper, or one's own.

    Attributes:
        name: Name of its file.
        content: Content of its file.
        printed: The paper's numbers as printed, by (row, column); averages in column ``"mean"``.
        plans: Every row in every profile and column that streams decide, by the key of what all
            its cells share; several where only corruptions and labels tell them apart.
    """

    name: str
    content: TableFile
    printed: dict[tuple[str, str], str]
    plans: dict[str, list[Plan]] = field(repr=False)
    _plans_of: dict[str, list[Plan]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def title(self) -> str:
        """What it is about."""
        return self.content.title

    @property
    def reference(self) -> str:
        """Which table of the paper it is."""
        return self.content.paper

    @property
    def kind(self) -> Literal["cells", "counts"]:
        """Whether its numbers are measured on streams or counted."""
        return "cells" if self.content.counts is None else "counts"

    @property
    def by(self) -> Literal["labels", "corruptions", "domains", "streams", "counts"]:
        """What its columns are."""
        return "counts" if self.content.counts else self.content.columns

    @property
    def profiles(self) -> tuple[str, ...]:
        """The sizes in which it can be measured."""
        return tuple(dict.fromkeys(plan.profile for plan in self._all_plans))

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the rows, each with its group."""
        groups = self.content.all_groups()
        return tuple(full_name(g, row) for g, row in itertools.product(groups, self.content.rows))

    @property
    def oracles(self) -> frozenset[str]:
        """Rows that are told the true label distribution."""
        rows = [r for r in self.content.rows if estimators.estimators[r.estimator].is_oracle]
        return frozenset(full_name(g, r) for g in self.content.all_groups() for r in rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, without the averages."""
        if self.by == "counts":
            return COLUMNS
        if self.by in ("domains", "streams"):
            return tuple(getattr(self.content, self.by))
        values = (getattr(plan.benchmark, self.by) for plan in self._all_plans)
        return tuple(dict.fromkeys(itertools.chain(*values)))

    @property
    def paper(self) -> dict[tuple[str, str], float]:
        """The paper's numbers: accuracies in percent, or counts."""
        return {place: _number(text) for place, text in self.printed.items()}

    def counts(self) -> dict[tuple[str, str], float]:
        """Count the numbers of a table of counts."""
        network = self.content.counts
        if network is None:
            raise SettingError(f"the numbers of {self.name}", must_be="counted, not measured")
        counts = {}
        for row in self.content.rows:
            adapter = row.adapter_recipe.get("adapter", {}) if row.adapter else None
            numbers = cost(**network.model_dump(), adapter=adapter)
            counts.update({(row.name, c): n for c, n in zip(COLUMNS, numbers, strict=True)})
        return counts

    def cells(
        self,
        profile: str = "cpu",
        seeds: int | None = None,
        only: Mapping[str, Sequence[str]] | None = None,
    ) -> list[Cell]:
        """Its cells, seed by seed and corruption by corruption; none of a table of counts.

        A group whose benchmark lacks the profile is left out.

        Args:
            profile: ``"cpu"``, ``"paper"``, or another one that the benchmark has.
            seeds: How many repetitions; by default the profile decides.
            only: Filters: accepted values by name, for example ``{"method": ["tent", "iabn"]}``.
        """
        if self.kind == "counts":
            return []
        plans = [plan for plan in self._all_plans if plan.profile == profile]
        if not plans:
            cure = near_miss(profile, self.profiles)
            raise UnknownName(f"{self.name} has no profile {profile!r}", cure=cure)
        streams = [
            _PlannedStream(plan, *stream)
            for plan in plans
            for stream in itertools.product(plan.benchmark.corruptions, plan.benchmark.labels)
        ]
        cells = []
        for i, (plan, corruption, labels) in enumerate(self._chosen(streams, only or {})):
            place = plan.benchmark.corruptions.index(corruption)
            for seed in range(seeds or plan.benchmark.profiles[profile].seeds):
                # so that images and models change as rarely as possible
                order = (seed, plan.block, place, i)
                cells.append((order, plan.cell(corruption, labels, seed)))
        return [cell for _, cell in sorted(cells, key=lambda pair: pair[0])]

    def paper_cells(self, rows: Sequence[str]) -> list[Cell]:
        """The cells behind the paper's numbers of some rows, for one seed.

        A table without the paper's profile, such as one's own, has none.
        """
        return self.cells(PAPER, 1, {"row": rows}) if PAPER in self.profiles else []

    def _chosen(
        self, streams: list[_PlannedStream], only: Mapping[str, Sequence[str]]
    ) -> list[_PlannedStream]:
        chosen = streams
        for name, accepted in only.items():
            if name not in FILTERS:
                raise SettingError(f"cannot choose by {name!r}", cure=near_miss(name, FILTERS))
            values = [accepted] if isinstance(accepted, str) else accepted
            known = set[str]().union(*(self._facts(s, name) for s in streams))
            for value in values:
                if value not in known:
                    cure = near_miss(value, known)
                    raise UnknownName(f"no {name} {value!r} in {self.name}", cure=cure)
            chosen = [s for s in chosen if not self._facts(s, name).isdisjoint(values)]
        if not chosen:
            raise SettingError(f"no cell of {self.name} matches all of {dict(only)}")
        return chosen

    def _facts(self, stream: _PlannedStream, name: str) -> set[str]:
        plan, corruption, labels = stream
        if name == "column":
            return {self._column(plan, corruption, labels)}
        return {**plan.facts, "corruption": {corruption}, "labels": {labels}}[name]

    def place(self, entry: Measurable) -> Place | None:
        """The place of a cell, or of the cell of a result; None if it is not in this table."""
        cell = entry.cell if isinstance(entry, Result) else entry
        plan = next((plan for plan in self._plans(cell) if plan.has(cell)), None)
        if plan is None:
            return None
        return Place(plan.profile, plan.row, self._column(plan, cell.corruption, cell.labels))

    def row_of(self, entry: Measurable) -> str:
        """The row of a cell or result."""
        return self._placed(entry).row

    def column_of(self, entry: Measurable) -> str:
        """The column of a cell or result."""
        return self._placed(entry).column

    def _placed(self, entry: Measurable) -> Place:
        place = self.place(entry)
        if place is None:
            raise UnknownName(f"the cell is not in {self.name}")
        return place

    def _column(self, plan: Plan, corruption: str, labels: str) -> str:
        return plan.column or (labels if self.by == "labels" else corruption)

    @property
    def _all_plans(self) -> Iterator[Plan]:
        return itertools.chain(*self.plans.values())

    def _plans(self, cell: Cell) -> list[Plan]:
        streamless = _streamless(cell)
        text = repr(streamless)  # far quicker than a key, and the same for all streams
        if text not in self._plans_of:
            self._plans_of[text] = self.plans.get(streamless.key, [])
        return self._plans_of[text]


def _streamless(cell: Cell) -> Cell:
    """The same cell for all cells that differ only in corruptions, labels and seeds."""
    model = cell.model and replace(cell.model, seed=0)
    return replace(cell, corruption=CLEAN, labels="uniform", seed=0, model=model)


def _number(text: str) -> float:
    return float(text[:-1]) * 1e6 if text.endswith("M") else float(text)


def table_names() -> list[str]:
    """The tables that come with the package: the paper's in its order, then the others."""

    def place(name: str) -> tuple[float, str]:
        number = name.partition("-")[0].removeprefix("table")
        return (int(number) if number.isdigit() else math.inf), name

    return sorted(_packaged(), key=place)


def _packaged() -> dict[str, Path]:
    with resources.as_file(resources.files("twoshift.bench") / "tables") as folder:
        return {f.stem: f for f in folder.glob("*.yaml") if not f.stem.startswith("_")}


def load_table(name: str | Path) -> Table:
    """Read a table by name or file and check all names and settings; needs no data or weights."""
    known = _packaged()
    path = Path(name) if str(name).endswith((".yaml", ".yml")) else known.get(str(name))
    if path is None or not path.exists():
        raise UnknownName(f"unknown table {str(name)!r}", cure=near_miss(str(name), known))
    content, numbers = _content(path), path.with_suffix(".csv")
    plans: dict[str, list[Plan]] = {}
    for plan in () if content.counts else plans_of(path.stem, content):
        same_key = plans.setdefault(plan.base.key, [])  # the base is what `_streamless` gives
        for same in same_key:
            if same.profile == plan.profile and same.shares_streams(plan):
                raise _twice(path, same, plan)
        same_key.append(plan)
    table = Table(path.stem, content, _numbers(numbers), plans)
    for row in table.rows:
        if table.rows.count(row) > 1:
            raise SettingError(f"two rows of {path} are called {row!r}")
    for row, column in table.printed:
        if row not in table.rows or column not in (*table.columns, MEAN):
            raise SettingError(f"{numbers} has a number for {row!r}, {column!r}: not in the table")
    return table


def _twice(path: Path, one: Plan, other: Plan) -> SettingError:
    kind, names = "rows", (one.row, other.row)
    if one.row == other.row:
        kind, names = f"in row {one.row!r}, columns", (str(one.column), str(other.column))
    return SettingError(f"{kind} {names[0]!r} and {names[1]!r} of {path} measure the same")


def _content(path: Path) -> TableFile:
    try:
        return TableFile.model_validate(read_yaml(path, f"table {path}"))
    except ValidationError as e:
        raise explained(f"table {path}", TableFile, e) from e


def _numbers(path: Path) -> dict[tuple[str, str], str]:
    numbers: dict[tuple[str, str], str] = {}
    if not path.exists():
        return numbers
    with path.open(encoding="utf-8", newline="") as lines:
        for line in csv.DictReader(lines):
            try:
                place, text = (line["row"], line["column"]), line["value"]
                _number(text)
            except (KeyError, ValueError, AttributeError, TypeError):
                raise SettingError(f"{path}", must_be="row,column,value", got=line) from None
            if place in numbers:
                raise SettingError(f"{path}: two numbers for {place}")
            numbers[place] = text
    return numbers
