"""Results to report: the published ones as a store would hold them, and made-up ones by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from twoshift.bench.cell import Cell, Model
from twoshift.bench.table import Place, load_table

PUBLISHED = Path(__file__).resolve().parents[2] / "results" / "cifar10-foundation.jsonl"
METRICS = {
    "images": 100,
    "accuracy": 0.5,
    "head_recall": 0.5,
    "medium_recall": 0.5,
    "tail_recall": 0.5,
    "s_error_final": 0.1,
    "accuracy_first10": 0.5,
    "accuracy_last10": 0.5,
}


def make(
    method: str = "tent",
    labels: str = "uniform",
    accuracy: float = 0.5,
    seed: int = 0,
    corruption: str = "contrast",
    width: int = 16,
    pixels: str = "CIFAR-C-style, generated",
    metrics: Mapping[str, Any] = {},
    **cell: Any,
) -> dict[str, Any]:
    """A result."""
    made = Cell(method, labels=labels, seed=seed, corruption=corruption, **cell)
    return {
        "key": made.key,
        "cell": asdict(made),
        "source": {
            "dataset": "cifar10",
            "architecture": "resnet18_cifar",
            "norm": "bn",
            "width": width,
            "seed": 0,
            "weights": "97ee96213e54a06e",
        },
        "adapter": None,
        "metrics": {**METRICS, "accuracy": accuracy, **metrics},
        "facts": {"pixels": pixels, "threads": 1, "seconds": 1.5, "peak_memory_mb": 300},
        "trace": {"s": [0.0, 0.1, 0.3], "true_prior": [0.5, 0.5], "prior": [], "accuracy": []},
    }


@dataclass(frozen=True)
class Paper:
    """A small table: rows by method."""

    title: str = "A table"
    rows: Sequence[str] = ("source", "tent", "bn_stats")
    columns: Sequence[str] = ("forward-50", "uniform", "backward-50")
    paper: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def place(self, found: Mapping[str, Any]) -> Place | None:
        cell = found["cell"]
        known = cell["method"] in self.rows and cell["labels"] in self.columns
        return Place("cpu", cell["method"], cell["labels"]) if known else None

    def cells(self, profile: str = "cpu", seeds: Any = None, only: Any = None) -> list[Cell]:
        assert profile == "paper"
        source = {"architecture": "resnet18_cifar", "epochs": 200, "settings": {}}
        return [Cell("tent", corruption=name, model=Model(source)) for name in ("contrast", "fog")]


@cache
def published() -> tuple[dict[str, Any], ...]:
    """What was measured for ``results/``, with the cells of Table 1."""
    cells: dict[tuple[Any, ...], Cell] = {}
    for cell in load_table("table1-cifar10").cells(
        "cpu", seeds=1, only={"corruption": ["contrast"]}
    ):
        assert cell.model is not None
        where = (cell.method, cell.adapter, cell.estimator, cell.model.source["settings"]["norm"])
        cells.setdefault(where, cell)  # rows with other adapters come later
    results = []
    for line in PUBLISHED.read_text().splitlines():
        record = json.loads(line)
        given, norm = record["cell"], record["source"]["norm"]
        like = cells.get((given["method"], given["adapter"], given["estimator"], norm))
        models = [c.model for (*_, n), c in cells.items() if n == norm]
        cell = Cell(**given, model=like.model if like else models[0])
        cell = replace(cell, model=cell.model and replace(cell.model, seed=0))
        names = ("s", "true_prior", "final_prior")
        s, truth, final = (record.pop(name) for name in names)
        trace = {"s": s, "true_prior": truth, "prior": [final], "accuracy": []}
        results.append({**record, "key": cell.key, "cell": asdict(cell), "trace": trace})
    return tuple(results)
