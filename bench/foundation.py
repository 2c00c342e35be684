"""CIFAR-10-LT to CIFAR-10-C, four corruptions: the results in ``results/cifar10-foundation.jsonl``.

    python -m bench.foundation --data DIR

Source models and adapters are taken from ``checkpoints/`` or trained there (an hour on two cores).
What is in the results file already, for the same weights, is not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from twoshift.adapter import load_adapter
from twoshift.bench import Cell, preset, run_cell
from twoshift.report import tables
from twoshift.storage import atomic_file
from twoshift.train.adapter import train_adapter
from twoshift.train.checkpoint import load_source
from twoshift.train.recipes import AdapterRecipe, SourceRecipe, load_recipe
from twoshift.train.source import train_source

DATASET, CLEAN = "cifar10", "clean"
CORRUPTIONS = ("gaussian_noise", "defocus_blur", "contrast", "jpeg_compression")
# every image is in the uniform stream, so its seeds differ by the order only
SEEDS = {"forward-50": (0, 1, 2), "uniform": (0,), "backward-50": (0, 1, 2)}
ROWS: dict[str, list[tuple[str, str | None, str]]] = {
    "bn": [
        ("source", None, "ema"),
        ("bn_stats", None, "ema"),
        ("tent", None, "ema"),
        ("tent", "identity", "ema"),
        ("tent", "trained", "ema"),
        ("tent", "trained", "oracle"),
    ],
    "iabn": [
        ("source", None, "ema"),
        ("iabn", None, "ema"),
        ("iabn", "identity", "ema"),
        ("iabn", "trained", "ema"),
        ("iabn", "trained", "oracle"),
    ],
}


def folders(checkpoints: Path, norm: str) -> tuple[Path, Path]:
    """Where the source model and its adapter live."""
    return checkpoints / f"{DATASET}-{norm}", checkpoints / f"{DATASET}-{norm}-adapter"


def prepare(checkpoints: Path, norm: str, data: Path | None) -> None:
    """Train what is missing."""
    source_folder, adapter_folder = folders(checkpoints, norm)
    recipe = load_recipe(SourceRecipe, "cifar-cpu", settings={"norm": norm})
    source = train_source(recipe, source_folder, data=data)
    train_adapter(source, load_recipe(AdapterRecipe, "cifar-cpu"), adapter_folder, data=data)


def cells(norm: str) -> Iterator[Cell]:
    """Everything that is measured with one source model; first, what it can do undisturbed."""
    yield Cell("source", corruption=CLEAN)
    for method, adapter, estimator in ROWS[norm]:
        settings = preset(DATASET, method, with_adapter=adapter is not None)
        for corruption in CORRUPTIONS:
            for labels, seeds in SEEDS.items():
                for seed in seeds:
                    yield Cell(
                        method,
                        settings,
                        adapter,
                        estimator,
                        corruption=corruption,
                        labels=labels,
                        seed=seed,
                    )


def key(norm: str, cell: Cell, checkpoints: Path) -> str:
    """All that decides a number: the cell and the weights."""
    source, adapter = weights(checkpoints, norm)
    return json.dumps([asdict(cell), source, adapter if cell.adapter == "trained" else None])


@cache
def weights(checkpoints: Path, norm: str) -> tuple[str, str]:
    """Hashes of the source model and of its adapter."""
    source_folder, adapter_folder = folders(checkpoints, norm)
    return load_source(source_folder).weights, load_adapter(adapter_folder).fingerprint()


def found_key(result: dict[str, Any]) -> str:
    """The key of a result in the file."""
    return json.dumps([result["cell"], result["source"]["weights"], result["adapter"]])


def measure(checkpoints: Path, norm: str, cell: Cell, data: Path | None) -> dict[str, Any]:
    """One cell, slimmed for publication: of the trace only s, and the last estimate."""
    source_folder, adapter_folder = folders(checkpoints, norm)
    result = run_cell(cell, load_source(source_folder), load_adapter(adapter_folder), data=data)
    trace = result.pop("trace")
    result["s"] = [round(s, 4) for s in trace["s"]]
    result["final_prior"] = [round(p, 5) for p in trace["prior"][-1]]
    result["true_prior"] = [round(p, 5) for p in trace["true_prior"]]
    return result


def read(path: Path) -> list[dict[str, Any]]:
    """The results so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(path: Path, results: list[dict[str, Any]]) -> None:
    """One JSON object per line, in table order."""
    order = [(norm, *row) for norm in ROWS for row in ROWS[norm]]

    def place(r: dict[str, Any]) -> tuple[Any, ...]:
        c = r["cell"]
        row = (r["source"]["norm"], c["method"], c["adapter"], c["estimator"])
        place = (CLEAN, *CORRUPTIONS).index(c["corruption"])
        return order.index(row), place, c["labels"], c["seed"]

    with atomic_file(path) as temporary:
        temporary.write_text("".join(json.dumps(r) + "\n" for r in sorted(results, key=place)))


def name(result: dict[str, Any]) -> str:
    """Row of the table; the two source models are told apart."""
    plain = tables.row_name(result)
    return f"{plain} ({result['source']['norm'].upper()})" if plain == "Source" else plain


def disturbed(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All but the clean ones."""
    return [r for r in results if r["cell"]["corruption"] != CLEAN]


def summary(results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    table = tables.with_mean(tables.grid(disturbed(results), row=name))
    clean = {
        r["source"]["norm"].upper(): f"{100 * r['metrics']['accuracy']:.1f}"
        for r in results
        if r["cell"]["corruption"] == CLEAN
    }
    pairs = [
        ("TENT + adapter", "TENT"),
        ("TENT + adapter", "TENT + identity adapter"),
        ("TENT + adapter, oracle prior", "TENT"),
        ("TENT + adapter, oracle prior", "TENT + identity adapter"),
        ("IABN + adapter", "IABN"),
        ("IABN + adapter", "IABN + identity adapter"),
        ("IABN + adapter, oracle prior", "IABN"),
        ("IABN + adapter, oracle prior", "IABN + identity adapter"),
    ]
    estimates = tables.grid(disturbed(results), "s_error_mean", row=name)
    pixels = sorted({r["facts"]["pixels"] for r in disturbed(results)})
    lines = [
        "# CIFAR-10-LT (ratio 100) to corrupted CIFAR-10, severity 5",
        "",
        "Made by `python -m bench.foundation` from `results/cifar10-foundation.jsonl`. Online",
        f"accuracy in %, mean over {', '.join(CORRUPTIONS)}; width-16 ResNet-18, one source",
        "training, batches of 64; 95 % interval (Student's t) over 3 stream seeds (uniform: one).",
        f"Pixels: {'; '.join(pixels)}. Clean test images, uniform labels, source model: "
        + ", ".join(f"{norm} {value}" for norm, value in clean.items())
        + ".",
        "",
        tables.markdown(table),
        "Paired differences on identical streams, points of accuracy:",
        "",
        tables.markdown_differences(tables.differences(table, pairs)),
        "Backward-50 by corruption, since a mean hides what differs:",
        "",
        by_corruption(results, "backward-50"),
        "Error of the label estimate: s minus the true s, mean over time (+: too far to the head):",
        "",
        tables.markdown(estimates, scale=1, digits=2),
    ]
    return "\n".join(lines)


def by_corruption(results: list[dict[str, Any]], labels: str) -> str:
    """One column per corruption, mean over seeds."""
    lines = ["| | " + " | ".join(CORRUPTIONS) + " |", "|---|" + "---:|" * len(CORRUPTIONS)]
    columns = {}
    for corruption in CORRUPTIONS:
        place = (corruption, labels)
        there = [r for r in results if (r["cell"]["corruption"], r["cell"]["labels"]) == place]
        columns[corruption] = tables.grid(there, row=name)
    for row in columns[CORRUPTIONS[0]]:
        values = [f"{100 * columns[c][row][labels].mean:.1f}" for c in CORRUPTIONS]
        lines.append(f"| {row} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def headline(results: list[dict[str, Any]]) -> str:
    """The table of the README."""
    table = tables.with_mean(tables.grid(disturbed(results), row=name))
    return (
        "CIFAR-10, long-tailed 100 to 1 in training, corrupted at test time (mean over "
        f"{', '.join(CORRUPTIONS)} at severity 5); online accuracy in %, 95 % interval over three\n"
        "streams. A slim ResNet-18 (width 16), one training: these are not the paper's numbers.\n\n"
        f"{tables.markdown(table)}\n"
        "Measured by `python -m bench.foundation`; all of it in\n"
        "[results/cifar10-foundation.md](results/cifar10-foundation.md).\n"
    )


def with_headline(readme: str, table: str) -> str:
    """The README with ``table`` between its markers."""
    start, end = "<!-- results:start -->\n", "<!-- results:end -->"
    before, _, rest = readme.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}{table}{end}{after}"


def main() -> None:
    """Train what is missing, run what is missing, write the results and their table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=None, help="folder of the data sets")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--out", type=Path, default=Path("results/cifar10-foundation.jsonl"))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, context, torch.set_num_threads, (1,)) as pool:
        list(pool.map(prepare, [options.checkpoints] * 2, ROWS, [options.data] * 2))
        wanted = {
            key(norm, cell, options.checkpoints): (norm, cell)
            for norm in ROWS
            for cell in cells(norm)
        }
        results = [r for r in read(options.out) if wanted.pop(found_key(r), None)]
        futures = [
            pool.submit(measure, options.checkpoints, norm, cell, options.data)
            for norm, cell in wanted.values()
        ]
        console = Console(stderr=True)
        for future in track(as_completed(futures), "cells", len(futures), console=console):
            results.append(future.result())
            write(options.out, results)
    text = summary(results)
    with atomic_file(options.out.with_suffix(".md")) as temporary:
        temporary.write_text(text)
    readme = Path("README.md")
    if readme.exists():
        readme.write_text(with_headline(readme.read_text(), headline(results)))
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
