"""What the benchmark runner costs: ``python -m bench.runner_speed [--out FILE]``.

Overhead over a bare loop, resuming, reporting, processes against one thread, dask. Ratios are
within one run. The limits on seconds and megabytes are generous on purpose: they are there to
catch work that grows with the square of the cells.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from bench import speed_report
from bench.timing import Check
from twoshift.bench.cell import Cell, Model, build, evaluate
from twoshift.bench.launch import launcher
from twoshift.bench.run import missing, run_cells
from twoshift.bench.store import Store, import_lines
from twoshift.bench.table import load_table
from twoshift.bench.workshop import Workshop
from twoshift.data.stream import Stream
from twoshift.priors import class_order, named
from twoshift.report.compare import compare
from twoshift.report.page import Facts, render
from twoshift.storage import write_json
from twoshift.train.recipes import AdapterRecipe, SourceRecipe, load_recipe

ROUNDS, SEEDS = 5, 4
MANY, VERY_MANY = 5000, 20_000


def small_model() -> Model:
    """A network of the demo, trained for one epoch on digits that need no download."""
    source = load_recipe(SourceRecipe, "demo", epochs=1)
    return Model(source.model_dump(), load_recipe(AdapterRecipe, "demo", epochs=1).model_dump())


def small_cells(count: int = SEEDS) -> list[Cell]:
    """Streams of some seconds in all."""
    return [
        Cell(method, corruption="contrast", labels="uniform", seed=seed, model=small_model())
        for seed in range(count)
        for method in ("tent", "bn_stats")
    ]


def seconds(run: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def bare_loop(workshop: Workshop, cells: list[Cell]) -> None:
    """The same streams and methods, nothing kept."""
    for cell in cells:
        assert cell.model is not None
        source = workshop.source(cell.model)
        card = source.card
        order = list(class_order(card.class_counts))
        prior = named(cell.labels, len(card.classes), order=order, seed=cell.seed)
        images = workshop.images(cell, source)
        stream = Stream(images, prior, batch_size=cell.batch_size, seed=cell.seed)
        evaluate(build(cell, source, None, stream), stream, card.class_counts).summary()


def overhead(workshop: Workshop, folder: Path) -> Check:
    """The runner, store included, against the bare loop."""
    cells = small_cells()
    start = launcher("local")
    bare_loop(workshop, cells)  # warm

    def through_the_runner(i: int) -> None:
        with Store(folder / f"overhead-{i}.db") as store:
            run_cells(cells, store, lambda todo: start(workshop, todo))

    ratios = []
    for i in range(ROUNDS):
        bare = seconds(lambda: bare_loop(workshop, cells))
        ratios.append(seconds(partial(through_the_runner, i)) / bare)
    return Check("runner / bare loop", median(ratios), high=1.03)


def in_parallel(workshop: Workshop, folder: Path) -> Check:
    """Two workers of one thread each against one thread here."""
    cells = small_cells(4 * SEEDS)

    def run(name: str, store: Path, **options: Any) -> None:
        start = launcher(name, options)
        with Store(store) as opened:
            run_cells(cells, opened, lambda todo: start(workshop, todo))

    torch.set_num_threads(1)
    local = seconds(lambda: run("local", folder / "local.db"))
    both = seconds(lambda: run("processes", folder / "processes.db", workers=2))
    gain = local / both
    return Check("2 processes / local, cells per second", gain, low=1.6, high=10.0)


def fake_results(cells: list[Cell]) -> Iterator[dict[str, Any]]:
    """Records of the right shape; only their number matters here."""
    trace = {"accuracy": [0.5] * 40, "s": [0.1] * 40, "prior": [[0.1] * 10] * 40}
    for i, cell in enumerate(cells):
        assert cell.model is not None
        yield {
            "key": cell.key,
            "cell": asdict(cell),
            "source": {
                "dataset": "cifar10",
                "architecture": "resnet18_cifar",
                "norm": "bn",
                "width": 16,
                "strategy": "balanced_softmax",
                "seed": cell.model.seed,
                "weights": cell.model.source_key,
                "calibration_folds": None,
            },
            "adapter": None,
            "metrics": FAKE_METRICS | {"accuracy": 0.3 + 0.4 * (i % 97) / 97},
            "trace": trace | {"true_prior": [0.1] * 10},
            "facts": {"pixels": "none", "threads": 1, "seconds": 1.0, "peak_memory_mb": 1},
        }


FAKE_METRICS: dict[str, Any] = {"images": 2476, "batches": 39, "s_error_final": 0.0}


def many(folder: Path) -> list[Check]:
    """Going on with a finished table, and a page of very many cells."""
    table = load_table("table1-cifar10")
    cells = table.cells("cpu", seeds=3)[:MANY]
    with Store(folder / "many.db") as store:
        _fill(store, cells, folder)
        again = load_table("table1-cifar10")
        resume = seconds(lambda: missing(again.cells("cpu", seeds=3)[:MANY], store))
        assert not missing(cells, store)
    crowd = [c for seed in range(20) for c in _with_seed(table.cells("cpu"), seed)][:VERY_MANY]
    with Store(folder / "very-many.db") as store:
        _fill(store, crowd, folder)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        facts = Facts()
        compared = compare([load_table("table1-cifar10")], facts.over(store.results()))
        page = render(compared, facts, store.get, store.failures(), [])
        taken = time.perf_counter() - start
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return [
        Check(f"resume of {len(cells):,} finished cells", resume, high=3.0, unit="s"),
        Check(f"page of {len(crowd):,} cells", taken, high=20.0, unit="s"),
        Check(f"page of {len(crowd):,} cells, memory", peak, high=2000, unit="MB"),
        Check(f"page of {len(crowd):,} cells, size", len(page.encode()) / 1e6, high=15, unit="MB"),
    ]


def _fill(store: Store, cells: list[Cell], folder: Path) -> None:
    lines = folder / "lines.jsonl"
    with lines.open("w") as f:
        f.writelines(json.dumps(result) + "\n" for result in fake_results(cells))
    import_lines(store, lines)


def _with_seed(cells: list[Cell], seed: int) -> Iterator[Cell]:
    for cell in cells:
        assert cell.model is not None
        yield replace(cell, seed=seed, model=replace(cell.model, seed=seed))


def on_dask(workshop: Workshop) -> list[Check]:
    """What a cell costs beside its work on a local cluster; nothing where dask is missing."""
    try:
        import distributed  # noqa: F401
    except ImportError:
        return []
    cells = small_cells(8)
    start = launcher("dask", {"workers": 1})
    torch.set_num_threads(1)
    local = seconds(lambda: list(launcher("local")(workshop, cells)))
    marks = [time.perf_counter() for _ in start(workshop, cells)]
    # from the first outcome on: the cluster is warm then
    each = (marks[-1] - marks[0]) / (len(cells) - 1) - local / len(cells)
    return [Check("dask, per cell beside its work", max(each, 0.0) * 1000, high=50, unit="ms")]


def main(
    out: Annotated[Path, typer.Option("--out", help="JSON file")] = Path(
        "results/runner-speed.json"
    ),
) -> None:
    """Measure, print, write; exit code 1 if a limit is broken."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workshop = Workshop(folder / "models", folder / "data")
        checks = [overhead(workshop, folder), in_parallel(workshop, folder), *many(folder)]
        checks += on_dask(workshop)
    record = {"checks": [{**asdict(c), "ok": c.ok} for c in checks], "methods": {}}
    Console(width=120).print(speed_report.tables(record)[0])
    write_json(out, record)
    if not all(c.ok for c in checks):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
