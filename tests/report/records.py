"""Results to report: some of the published ones, and made-up ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from twoshift.bench.cell import Cell, Model
from twoshift.bench.table import Place, load_table

PUBLISHED = Path(__file__).resolve().parents[2] / "results"
CORRUPTIONS = ("gaussian_noise", "defocus_blur", "contrast", "jpeg_compression")
LABELS = ("forward-50", "uniform", "backward-50")
ROWS = (
    "Source",
    "BN Stats",
    "TENT",
    "TENT+identity adapter",
    "TENT+Ours",
    "TENT+Ours (oracle)",
    "IABN",
    "IABN+identity adapter",
    "IABN+Ours",
    "IABN+Ours (oracle)",
)
TRACE = {"s": [0.0, 0.1, 0.3], "true_prior": [0.5, 0.5], "prior": [], "accuracy": []}
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
        "trace": {**TRACE},
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
def published(name: str = "table1-cifar10") -> tuple[dict[str, Any], ...]:
    """The published results of a table; of Table 1, a few rows on four corruptions."""
    lines = (PUBLISHED / f"{name}.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    if name != "table1-cifar10":
        return tuple(results)
    table = load_table(name)
    return tuple(
        r
        for r in results
        if r["cell"]["corruption"] in CORRUPTIONS
        if r["cell"]["labels"] in LABELS
        if table.row_of(r) in ROWS
    )
