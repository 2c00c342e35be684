"""The content of the YAML file of a table."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from twoshift.bench.cell import CLEAN, NATURAL
from twoshift.errors import SettingError
from twoshift.registry import near_miss


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BenchmarkProfile(_Content):
    """The size of a benchmark: which networks, and how many repetitions.

    Attributes:
        source_recipe: Settings of the source training; ``recipe`` names one to start from.
        adapter_recipe: Settings of the adapter's training, in the same way.
        seeds: Number of repetitions, each with its own trainings and streams.
    """

    source_recipe: dict[str, Any]
    adapter_recipe: dict[str, Any]
    seeds: int = Field(1, ge=1)


class Benchmark(_Content):
    """What models are trained on and which streams they meet.

    Attributes:
        preset: Name of the test-time settings of the methods.
        severity: Severity of the corruptions.
        corruptions: Registered names, or ``"clean"``.
        labels: Names of label distributions.
        target: Data set of the streams, where it differs from the source's.
        batch_size: Images per batch.
        order: Name of the order in which images arrive.
        images: At most so many images in a stream.
        iabn: Settings of the backbone for rows with IABN layers.
        profiles: The sizes it can be measured in, by name.
    """

    preset: str | None = None
    severity: int = Field(5, ge=1, le=5)
    corruptions: list[str] = Field([CLEAN], min_length=1)
    labels: list[str] = Field([NATURAL], min_length=1)
    target: str | None = None
    batch_size: int = Field(64, ge=1)
    order: str = "shuffled"
    images: int | None = Field(None, ge=1)
    iabn: dict[str, Any] = Field(default_factory=dict)
    profiles: dict[str, BenchmarkProfile] = Field(min_length=1)


class Group(_Content):
    """A part of a table: all rows again, on another benchmark or with another source model."""

    benchmark: str
    source_recipe: dict[str, Any] = Field(default_factory=dict)


class Domain(_Content):
    """A column of a table by domains: the data sets that the model goes from and to."""

    source: str
    target: str


class StreamColumn(_Content):
    """A column of a table by streams; what it does not say is as in the benchmark.

    Attributes:
        corruptions: The corruptions, over which the column is a mean.
        labels: Name of the label distribution; without it, the mean over all of the benchmark.
        batch_size: Images per batch.
        order: Name of the order in which images arrive.
        images: At most so many images in a stream.
    """

    corruptions: list[str] | None = Field(None, min_length=1)
    labels: str | None = None
    batch_size: int | None = Field(None, ge=1)
    order: str | None = None
    images: int | None = Field(None, ge=1)

    def on(self, benchmark: Benchmark) -> Benchmark:
        """The benchmark with only the streams of this column."""
        changes = self.model_dump(exclude_none=True)
        if self.labels is not None:
            changes["labels"] = [self.labels]
        return benchmark.model_copy(update=changes)


class Row(_Content):
    """A row of a table.

    Attributes:
        name: Name as printed.
        method: Registered name of the method.
        norm: Kind of the normalisation layers of the source model; null leaves it to the recipe.
        adapter: ``"trained"``, or the name of one that needs no training; None attaches none.
        estimator: Registered name of the estimator.
        freeze: Paths of modules whose weights stay; a row with the paper's adapter freezes the last
            stage, and says so.
        settings: Settings of the method that differ from the preset's.
        estimator_settings: Settings of the estimator that differ from the preset's.
        source_recipe: Changes of the source training.
        adapter_recipe: Changes of the adapter's training.
        batch_size: Images per batch, where the row has others than its columns.
        streams: The columns of a table by streams that the row is measured in; by default all.
    """

    name: str
    method: str
    norm: Literal["bn", "iabn", "gn"] | None = "bn"
    adapter: str | None = None
    estimator: str = "ema"
    freeze: list[str] | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    estimator_settings: dict[str, Any] = Field(default_factory=dict)
    source_recipe: dict[str, Any] = Field(default_factory=dict)
    adapter_recipe: dict[str, Any] = Field(default_factory=dict)
    batch_size: int | None = Field(None, ge=1)
    streams: list[str] | None = Field(None, min_length=1)


class Counts(_Content):
    """The network whose operations and parameters are counted, and the size of its images."""

    architecture: str
    classes: int = Field(ge=2)
    size: int = Field(ge=1)
    settings: dict[str, Any] = Field(default_factory=dict)


class TableFile(_Content):
    """A table.

    Attributes:
        title: What the table is about.
        paper: Which table of the paper it is.
        benchmark: The benchmark of all rows.
        groups: Instead of one benchmark: parts of the table, by name.
        columns: What the columns are; all else is averaged.
        domains: The columns of a table by domains.
        streams: The columns of a table by streams.
        rows: The rows, in order.
        benchmarks: Benchmarks of its own, besides those that come with the package.
        counts: Instead of a benchmark, for a table of costs.
    """

    title: str
    paper: str = ""
    benchmark: str | None = None
    groups: dict[str, Group] = Field(default_factory=dict)
    columns: Literal["labels", "corruptions", "domains", "streams"] = "labels"
    domains: dict[str, Domain] = Field(default_factory=dict)
    streams: dict[str, StreamColumn] = Field(default_factory=dict)
    rows: list[Row] = Field(min_length=1)
    benchmarks: dict[str, Benchmark] = Field(default_factory=dict)
    counts: Counts | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if sum(map(bool, (self.benchmark, self.groups, self.counts))) != 1:
            raise ValueError("exactly one of benchmark, groups and counts must be given")
        if bool(self.domains) != (self.columns == "domains"):
            raise ValueError("domains must be given if they are the columns, and only then")
        if bool(self.streams) != (self.columns == "streams"):
            raise ValueError("streams must be given if they are the columns, and only then")
        for row in self.rows:
            for name in row.streams or ():
                if name not in self.streams:
                    cure = near_miss(name, self.streams)
                    raise ValueError(f"no stream {name!r}, which row {row.name!r} names. {cure}")
        return self

    def all_groups(self) -> dict[str, Group]:
        """The groups; a table without groups has one with an empty name."""
        return self.groups or {"": Group(benchmark=self.benchmark or "")}


def full_name(group: str, row: Row) -> str:
    """The name of a row, with its group."""
    return f"{group}: {row.name}" if group else row.name


PARTS: dict[str, type[_Content]] = {
    "rows": Row,
    "groups": Group,
    "domains": Domain,
    "streams": StreamColumn,
    "benchmarks": Benchmark,
    "profiles": BenchmarkProfile,
    "counts": Counts,
}


def explained(whose: str, kind: type[BaseModel], error: ValidationError) -> SettingError:
    """An error that says what is wrong, and which setting may have been meant."""
    # a misspelt required setting is also reported as missing: the misspelling says more
    wrong = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    place, cure = wrong["loc"], None
    if wrong["type"] == "extra_forbidden":
        parts = (PARTS[p] for p in reversed(place[:-1]) if isinstance(p, str) and p in PARTS)
        cure = near_miss(str(place[-1]), next(parts, kind).model_fields)
    name = ".".join(map(str, place))
    what = f"setting {name!r} of {whose}" if name else whose
    got = wrong["input"] if name and wrong["type"] != "missing" else None
    return SettingError(f"{what}: {wrong['msg']}", got=got, cure=cure)
