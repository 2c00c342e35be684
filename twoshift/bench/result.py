"""The result of a cell: what was measured, with which weights, and under which conditions."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from twoshift.bench.cell import Cell, cell_from
from twoshift.errors import InputError


@dataclass(frozen=True)
class SourceFacts:
    """The source model that a result was measured with.

    Attributes:
        dataset: The data set it was trained on.
        architecture: Name of the backbone.
        norm: Kind of its normalisation layers, where its settings say so.
        width: Width of the network, where its settings say so.
        strategy: How the training dealt with the long tail.
        seed: Seed of the training.
        weights: Hash of the weights.
        calibration_folds: Folds of its calibration; None without a calibration.
    """

    dataset: str
    architecture: str
    norm: str | None
    width: int | None
    strategy: str
    seed: int
    weights: str
    calibration_folds: int | None = None


@dataclass(frozen=True)
class Result:
    """What `run_cell` returns.

    Attributes:
        key: Key of the cell.
        cell: What was measured.
        source: The source model.
        adapter: Hash of the trained adapter; None where the cell uses none.
        metrics: By name; None where a metric is not defined, for example the recall of a group of
            classes that the stream does not have.
        facts: Where the numbers come from: pixels, versions, device, time, memory.
        trace: What was measured per batch; None where it was not stored or not read.
    """

    key: str
    cell: Cell
    source: SourceFacts
    adapter: str | None
    metrics: dict[str, float | None]
    facts: dict[str, Any] = field(default_factory=dict)
    trace: dict[str, Any] | None = None

    @property
    def accuracy(self) -> float:
        """The share of right predictions."""
        accuracy = self.metrics["accuracy"]
        assert accuracy is not None
        return accuracy

    def to_json(self) -> dict[str, Any]:
        """As plain data: a record of a store or of a file of JSON lines."""
        content = {**vars(self), "cell": asdict(self.cell), "source": asdict(self.source)}
        if self.cell.images is None:  # as in records of version 0.1.0
            del content["cell"]["images"]
        if self.trace is None:
            del content["trace"]
        return content

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """From the plain data of a record.

        Raises:
            InputError: The data are not those of a result.
        """
        names = set(content) if isinstance(content, dict) else set()
        if missing := {"key", "cell", "source", "metrics"} - names:
            got = f"none of its {', '.join(sorted(missing))}"
            raise InputError("a result", must_be="what run_cell returns", got=got)
        return cls(
            key=content["key"],
            cell=cell_from(content["cell"]),
            source=_source_facts(content["source"]),
            adapter=content.get("adapter"),
            metrics=content["metrics"],
            facts=content.get("facts", {}),
            trace=content.get("trace"),
        )


def _source_facts(content: dict[str, Any]) -> SourceFacts:
    if "weights" not in content:
        raise InputError("the source of a result", must_be="known by its weights")
    try:
        return SourceFacts(**content)
    except TypeError as e:
        names = ", ".join(f.name for f in fields(SourceFacts))
        raise InputError("the source of a result", must_be=f"described by {names}", got=e) from e
