"""Results as `run_cell` returns them, without running anything."""

from __future__ import annotations

from dataclasses import replace

from twoshift.bench.cell import Cell, Model
from twoshift.bench.result import Result, SourceFacts

MODEL = Model({"dataset": "toy", "norm": "bn"}, {"epochs": 2}, seed=3)


def make_result(
    seed: int = 0,
    method: str = "tent",
    adapter: str | None = None,
    *,
    model: Model | None = MODEL,
    weights: str = "a" * 64,
    adapter_weights: str = "b" * 64,
    accuracy: float = 0.5,
    seconds: float = 2.0,
    batches: int = 3,
) -> Result:
    cell = Cell(method, {"lr": 1e-3}, adapter, corruption="contrast", seed=seed, model=model)
    return Result(
        key=cell.key,
        cell=cell,
        source=SourceFacts("toy", "toy_net", "bn", 16, "balanced_softmax", 3, weights),
        adapter=adapter_weights if adapter == "trained" else None,
        metrics={
            "images": 192,
            "accuracy": accuracy,
            "accuracy_first10": accuracy,
            "accuracy_last10": accuracy,
            "head_recall": 0.75,
            "medium_recall": 0.5,
            "tail_recall": None,
            "nll": 1 / 3,
            "s_error_final": 0.125,
        },
        facts={"seconds": seconds, "torch": "2.13.0", "pixels": "generated"},
        trace={
            "accuracy": [0.5 + i / 100 for i in range(batches)],
            "prior": [[0.25, 0.75]] * batches,
            "s": [-0.5] * batches,
        },
    )


def without_trace(result: Result) -> Result:
    return replace(result, trace=None)
