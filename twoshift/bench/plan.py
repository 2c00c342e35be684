"""From the rows of a table's file to cells: combines the settings of presets, recipes and rows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from typing import Any

import yaml
from pydantic import ValidationError

from twoshift import adapters, models
from twoshift.bench.cell import TRAINED, Cell, Model
from twoshift.bench.request import check_stream, make_cell
from twoshift.bench.table_file import (
    Benchmark,
    Domain,
    Group,
    Row,
    StreamColumn,
    TableFile,
    explained,
    full_name,
)
from twoshift.data.base import datasets
from twoshift.errors import UnknownName
from twoshift.registry import check_settings, near_miss
from twoshift.train.recipes import AdapterRecipe, SourceRecipe, load_recipe, merged


@dataclass(frozen=True)
class Plan:
    """A row in one profile, group and block of columns: all of its cells except for the streams.

    Attributes:
        profile: Name of the profile.
        group: Name of the group; empty in a table without groups.
        column: The pair of domains, or the kind of streams; None where labels or corruptions
            decide the column.
        block: Number of the group and column.
        row: Full name of the row, with the group.
        content: The row in the file.
        benchmark: The benchmark, which has the streams: in a table by streams, those of the column.
        base: One of the cells, on an arbitrary stream.
    """

    profile: str
    group: str
    column: str | None
    block: int
    row: str
    content: Row
    benchmark: Benchmark
    base: Cell

    def cell(self, corruption: str, labels: str, seed: int) -> Cell:
        """The cell on one stream; the seed is also that of the trainings."""
        assert self.base.model is not None
        model = replace(self.base.model, seed=seed)
        return replace(self.base, corruption=corruption, labels=labels, seed=seed, model=model)

    def has(self, cell: Cell) -> bool:
        """Whether the corruption and the labels of a cell are among those of its streams."""
        streams = self.benchmark
        return cell.corruption in streams.corruptions and cell.labels in streams.labels

    def shares_streams(self, other: Plan) -> bool:
        """Whether some corruption and labels are among the streams of both."""
        mine, theirs = self.benchmark, other.benchmark
        return not (
            set(mine.corruptions).isdisjoint(theirs.corruptions)
            or set(mine.labels).isdisjoint(theirs.labels)
        )

    @cached_property
    def facts(self) -> dict[str, set[str]]:
        """What filters compare with."""
        row = self.content
        return {
            "row": {self.row, row.name},
            "group": {self.group} - {""},
            "method": {row.method},
            "norm": {row.norm or "none"},
            "adapter": {row.adapter or "none"},
            "estimator": {row.estimator if self.base.uses_estimator else "none"},
        }


@cache
def benchmarks() -> dict[str, Benchmark]:
    """The benchmarks that come with the package, by name."""
    text = (resources.files("twoshift.bench") / "tables" / "_benchmarks.yaml").read_text()
    return {name: Benchmark.model_validate(b) for name, b in yaml.safe_load(text).items()}


def plans_of(table: str, content: TableFile) -> Iterator[Plan]:
    """Plan every row in every profile, group and column, and check all settings."""
    known = {**benchmarks(), **content.benchmarks}
    columns: list[tuple[str | None, Domain | StreamColumn | None]] = [(None, None)]
    columns = [*content.domains.items(), *content.streams.items()] or columns
    blocks = itertools.product(content.all_groups().items(), columns)
    for block, ((name, group), (column, kind)) in enumerate(blocks):
        if group.benchmark not in known:
            cure = near_miss(group.benchmark, known)
            raise UnknownName(f"unknown benchmark {group.benchmark!r} in {table}", cure=cure)
        benchmark = known[group.benchmark]
        benchmark = kind.on(benchmark) if isinstance(kind, StreamColumn) else benchmark
        domain = kind if isinstance(kind, Domain) else None
        for corruption, labels in itertools.product(benchmark.corruptions, benchmark.labels):
            check_stream(corruption, labels, benchmark.order)
        for profile, row in itertools.product(benchmark.profiles, content.rows):
            if row.streams is not None and column not in row.streams:
                continue
            base = _base(benchmark, profile, group, domain, row)
            yield Plan(profile, name, column, block, full_name(name, row), row, benchmark, base)


def _base(
    benchmark: Benchmark, profile: str, group: Group, domain: Domain | None, row: Row
) -> Cell:
    return make_cell(
        benchmark.preset,
        method=row.method,
        settings=row.settings if row.freeze is None else {**row.settings, "freeze": row.freeze},
        adapter=row.adapter,
        estimator=row.estimator,
        estimator_settings=row.estimator_settings,
        with_iabn=row.norm == "iabn",
        severity=benchmark.severity,
        batch_size=row.batch_size or benchmark.batch_size,
        order=benchmark.order,
        images=benchmark.images,
        model=_model(benchmark, profile, group, domain, row),
        target=benchmark.target if domain is None else domain.target,
        whose=f"row {row.name!r}: ",
    )


def _model(
    benchmark: Benchmark, profile: str, group: Group, domain: Domain | None, row: Row
) -> Model:
    norm = {"norm": row.norm, **(benchmark.iabn if row.norm == "iabn" else {})}
    settings = {"settings": norm} if row.norm else {}
    size, dataset = benchmark.profiles[profile], {"dataset": domain.source} if domain else {}
    changes = (dataset, settings, group.source_recipe, row.source_recipe)
    source = full_recipe(SourceRecipe, merged(size.source_recipe, *changes))
    datasets[source["dataset"].partition(":")[0]]
    if ":" not in source["architecture"]:  # others are known to their libraries
        network = models.models[source["architecture"]]
        check_settings(f"row {row.name!r}: {source['architecture']}", network, source["settings"])
    if row.adapter != TRAINED:
        return Model(source)
    adapter = full_recipe(AdapterRecipe, merged(size.adapter_recipe, row.adapter_recipe))
    name, settings = AdapterRecipe.model_validate(adapter).named_adapter
    check_settings(f"row {row.name!r}: the adapter", adapters.adapters[name], settings)
    return Model(source, adapter)


def full_recipe(kind: type[SourceRecipe] | type[AdapterRecipe], part: dict[str, Any]) -> Any:
    """All settings of a recipe that is named, or of which some settings are given; plain data."""
    return json.loads(_recipe_text(kind, json.dumps(part)))


@cache  # files are read once; as text, so that no caller can change what is cached
def _recipe_text(kind: type[SourceRecipe] | type[AdapterRecipe], part: str) -> str:
    settings = json.loads(part)
    name = settings.pop("recipe", None)
    try:
        if name is None:
            return kind.model_validate(settings).model_dump_json()
    except ValidationError as e:
        raise explained("a recipe", kind, e) from e
    return load_recipe(kind, name, **settings).model_dump_json()
