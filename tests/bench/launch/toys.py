"""Real cells on 8x8 digits, and a workshop in which some cells go wrong on request."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoshift.bench.cell import Cell, Model
from twoshift.bench.launch import Outcome
from twoshift.bench.result import Result
from twoshift.bench.workshop import Workshop, silent
from twoshift.train.recipes import AdapterRecipe, SourceRecipe, load_recipe

SOURCE = load_recipe(SourceRecipe, "demo", dataset="digits8x8", ratio=10, epochs=1)
ADAPTER = load_recipe(AdapterRecipe, "demo", epochs=1)


def make_model(seed: int = 0) -> Model:
    return Model(SOURCE.model_dump(), ADAPTER.model_dump(), seed)


def make_cells() -> list[Cell]:
    """Cells that are quick to run, in an order that is good for nobody."""
    return [
        Cell(method, adapter=adapter, corruption=corruption, seed=seed, model=make_model())
        for seed in (0, 1)
        for corruption in ("clean", "contrast")
        for method, adapter in (("source", None), ("tent", "trained"), ("tent", None))
    ]


def asks(**settings: Any) -> Cell:
    """A cell with a wish for `Toy`."""
    return Cell("source", settings, model=make_model())


@dataclass
class Toy(Workshop):
    """Does what a cell's settings ask for; an ordinary cell is really run."""

    def run(self, cell: Cell, progress: Any = silent) -> Result:
        wish = dict(cell.settings)
        if "error" in wish:
            raise ValueError(wish["error"])
        if "killed" in wish:
            marks = Path(self.models) / wish["name"]
            with marks.open("a") as f:
                f.write("x")
            if len(marks.read_text()) <= wish["killed"]:
                os.kill(os.getpid(), wish["signal"])
        if "environment" in wish:
            raise ValueError(os.environ[wish["environment"]])
        if "sleeps" in wish:
            (Path(self.models) / wish["name"]).write_text(str(os.getpid()))
            progress(1, 2)
            time.sleep(wish["sleeps"])
        return super().run(Cell("source", model=cell.model) if wish else cell, progress)


def numbers(outcomes: list[Outcome]) -> dict[str, dict[str, Any]]:
    """Metrics and traces by key, without those that depend on the clock."""
    errors = [outcome.error for outcome in outcomes if outcome.error]
    assert not errors, "\n".join(errors)
    assert len({outcome.cell.key for outcome in outcomes}) == len(outcomes)
    found = {}
    for outcome in outcomes:
        result = outcome.result
        assert result is not None
        assert result.key == outcome.cell.key
        metrics = {k: v for k, v in result.metrics.items() if not k.startswith("ms_")}
        found[result.key] = {**metrics, "trace": result.trace}
    return found
