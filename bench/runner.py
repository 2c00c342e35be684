"""Cells of one data set on two processes, into a JSON lines file; what is there is not run again.

Shared by the commands that make ``results/``: each names its rows, corruptions and seeds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track

from twoshift.adapters import load_adapter
from twoshift.bench import Cell, preset, run_cell
from twoshift.bench.cell import cell_from
from twoshift.report import tables
from twoshift.storage import atomic_file
from twoshift.train.adapter import train_adapter
from twoshift.train.checkpoint import load_source
from twoshift.train.recipes import AdapterRecipe, SourceRecipe, load_recipe
from twoshift.train.source import train_source

DATASET, PRESET, CLEAN = "cifar10", "cifar10-c", "clean"
Result = dict[str, Any]


class Row(NamedTuple):
    """A row of a table: a method on one of the source models."""

    norm: str
    method: str
    adapter: str | None = None
    estimator: str = "ema"


@dataclass(frozen=True)
class Experiment:
    """What is measured.

    Attributes:
        rows: In the order of the table.
        corruptions: At severity 5.
        seeds: Of the streams, by label distribution.
        slow: Methods whose cells are started first.
    """

    rows: list[Row]
    corruptions: tuple[str, ...]
    seeds: dict[str, tuple[int, ...]]
    slow: frozenset[str] = field(default_factory=frozenset)

    @property
    def norms(self) -> list[str]:
        """The source models that are needed."""
        return list(dict.fromkeys(row.norm for row in self.rows))

    def cells(self) -> Iterator[tuple[str, Cell]]:
        """Everything that is measured, and what each source model can do undisturbed."""
        for norm in self.norms:
            yield norm, Cell("source", corruption=CLEAN)
        for row in sorted(self.rows, key=lambda row: row.method not in self.slow):
            for corruption in self.corruptions:
                for labels, seeds in self.seeds.items():
                    for seed in seeds:
                        yield row.norm, _cell(row, corruption, labels, seed)

    def place(self, result: Result) -> tuple[Any, ...]:
        """Where a result stands in the file."""
        c = result["cell"]
        row = Row(result["source"]["norm"], c["method"], c["adapter"], c["estimator"])
        corruption = (CLEAN, *self.corruptions).index(c["corruption"])
        return self.rows.index(row), corruption, c["labels"], c["seed"]


def _cell(row: Row, corruption: str, labels: str, seed: int) -> Cell:
    adapted = row.adapter is not None
    settings = preset(PRESET, row.method, adapted, with_iabn=row.norm == "iabn")
    return Cell(
        row.method,
        settings,
        row.adapter,
        row.estimator,
        corruption=corruption,
        labels=labels,
        seed=seed,
    )


def folders(checkpoints: Path, norm: str) -> tuple[Path, Path]:
    """Where the source model and its adapter live."""
    return checkpoints / f"{DATASET}-{norm}", checkpoints / f"{DATASET}-{norm}-adapter"


def prepare(checkpoints: Path, norm: str, data: Path | None) -> None:
    """Train what is missing."""
    source_folder, adapter_folder = folders(checkpoints, norm)
    recipe = load_recipe(SourceRecipe, "cifar-cpu", settings={"norm": norm})
    source = train_source(recipe, source_folder, data=data)
    train_adapter(source, load_recipe(AdapterRecipe, "cifar-cpu"), adapter_folder, data=data)


def key(norm: str, cell: Cell, checkpoints: Path) -> str:
    """All that decides a number: the cell and the weights."""
    source, adapter = weights(checkpoints, norm)
    return json.dumps([plain(cell), source, adapter if cell.adapter == "trained" else None])


def plain(cell: Cell) -> dict[str, Any]:
    """A cell as data, without what these results do not use."""
    return {k: v for k, v in asdict(cell).items() if k not in ("model", "target")}


@cache
def weights(checkpoints: Path, norm: str) -> tuple[str, str]:
    """Hashes of the source model and of its adapter."""
    source_folder, adapter_folder = folders(checkpoints, norm)
    return load_source(source_folder).weights, load_adapter(adapter_folder).fingerprint()


def found_key(result: Result) -> str:
    """The key of a result in the file."""
    cell = plain(cell_from(result["cell"]))
    return json.dumps([cell, result["source"]["weights"], result["adapter"]])


def measure(checkpoints: Path, norm: str, cell: Cell, data: Path | None) -> Result:
    """One cell, slimmed for publication: of the trace only s, and the last estimate."""
    source_folder, adapter_folder = folders(checkpoints, norm)
    result = run_cell(cell, load_source(source_folder), load_adapter(adapter_folder), data=data)
    trace = result.pop("trace")
    result["s"] = [round(s, 4) for s in trace["s"]]
    result["final_prior"] = [round(p, 5) for p in trace["prior"][-1]]
    result["true_prior"] = [round(p, 5) for p in trace["true_prior"]]
    return result


def read(path: Path) -> list[Result]:
    """The results so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(path: Path, results: list[Result], experiment: Experiment) -> None:
    """One JSON object per line, in table order."""
    ordered = sorted(results, key=experiment.place)
    with atomic_file(path) as temporary:
        temporary.write_text("".join(json.dumps(r) + "\n" for r in ordered))


def name(result: Result) -> str:
    """Row of a table; where a method runs on several source models, they are told apart."""
    plain, norm = tables.row_name(result), result["source"]["norm"]
    return plain if plain.startswith("IABN") else f"{plain} ({norm.upper()})"


def disturbed(results: list[Result]) -> list[Result]:
    """All but the clean ones."""
    return [r for r in results if r["cell"]["corruption"] != CLEAN]


def clean_accuracies(results: list[Result]) -> str:
    """What the source models can do on clean images with uniform labels."""
    return ", ".join(
        f"{r['source']['norm'].upper()} {100 * r['metrics']['accuracy']:.1f}"
        for r in results
        if r["cell"]["corruption"] == CLEAN
    )


def options(description: str | None, out: str) -> argparse.Namespace:
    """The command line of an experiment."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, default=None, help="folder of the data sets")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    return parser.parse_args()


def run(
    experiment: Experiment, given: argparse.Namespace, also: tuple[Path, ...] = ()
) -> list[Result]:
    """Train what is missing, run what is missing; results in table order.

    Args:
        experiment: What to measure.
        given: The command line.
        also: Other result files; what they hold is not run again.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, context, torch.set_num_threads, (1,)) as pool:
        n = len(experiment.norms)
        list(pool.map(prepare, [given.checkpoints] * n, experiment.norms, [given.data] * n))
        wanted = {
            key(norm, cell, given.checkpoints): (norm, cell) for norm, cell in experiment.cells()
        }
        known = [r for path in (given.out, *also) for r in read(path)]
        results = [r for r in known if wanted.pop(found_key(r), None)]
        futures = [
            pool.submit(measure, given.checkpoints, norm, cell, given.data)
            for norm, cell in wanted.values()
        ]
        console = Console(stderr=True)
        for future in track(as_completed(futures), "cells", len(futures), console=console):
            results.append(future.result())
            write(given.out, results, experiment)
    write(given.out, results, experiment)
    return sorted(results, key=experiment.place)


def publish(path: Path, text: str) -> None:
    """Write a table beside its results and show it."""
    with atomic_file(path) as temporary:
        temporary.write_text(text)
    Console().print(text, highlight=False, markup=False, soft_wrap=True)
