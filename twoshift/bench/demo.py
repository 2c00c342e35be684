"""The whole method on real handwritten digits, in minutes: train, adapt, measure.

Real MNIST images come with a Python package, so nothing is downloaded beyond it (the 8x8 digits of
scikit-learn were tried: too few and too coarse to tell the methods apart). For every seed a
source model (BN and IABN) and its adapter are trained on a long-tailed half and adapted to
corrupted streams of the other half.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from twoshift.adapters import load_adapter
from twoshift.bench.cell import Cell
from twoshift.bench.measure import run_cell
from twoshift.bench.result import Result
from twoshift.data import load
from twoshift.data.corrupted import corrupted
from twoshift.train.adapter import train_adapter
from twoshift.train.checkpoint import load_source
from twoshift.train.recipes import AdapterRecipe, SourceRecipe, load_recipe
from twoshift.train.source import train_source

CORRUPTIONS = ("impulse_noise", "contrast")
LABELS = ("forward-50", "forward-10", "uniform", "backward-10", "backward-50")
SEVERITY = 5
BATCH = 16
Progress = Callable[[int, int, str], None]


def rows(norm: str) -> list[Cell]:
    """The methods that a source model with ``norm`` layers is measured with."""
    if norm == "bn":
        names: list[tuple[str, str | None, str]] = [
            ("source", None, "ema"),
            ("bn_stats", None, "ema"),
            ("tent", None, "ema"),
            ("tent", "trained", "ema"),
            ("tent", "trained", "oracle"),
        ]
    else:
        names = [
            ("iabn", None, "ema"),
            ("iabn", "trained", "ema"),
            ("iabn", "trained", "oracle"),
        ]
    return [Cell(m, adapter=a, estimator=e, batch_size=BATCH) for m, a, e in names]


def run_demo(
    out: Path, seeds: int = 3, workers: int | None = None, progress: Progress = lambda *_: None
) -> list[Result]:
    """All results of the demo, in table order.

    Args:
        out: Folder for models and adapters; trained ones are used again.
        seeds: Independent repetitions: training and streams.
        workers: Processes, one thread each; by default one per core.
        progress: Called whenever a model or a row is done.
    """
    jobs = [(seed, norm) for seed in range(seeds) for norm in ("bn", "iabn")]
    steps = sum(1 + len(rows(norm)) for _, norm in jobs)
    measured: dict[tuple[int, int], list[Result]] = {}
    context = multiprocessing.get_context("spawn")  # a forked torch may hang
    with ProcessPoolExecutor(
        workers or os.cpu_count(), context, torch.set_num_threads, (1,)
    ) as pool:
        pending: dict[Future[Any], Callable[[Any], None]] = {}

        def keep(key: tuple[int, int], result: list[Result]) -> None:
            measured[key] = result

        def trained(seed: int, norm: str, _: None) -> None:
            for place, cell in enumerate(rows(norm)):
                key = (place if norm == "bn" else place + len(rows("bn")), seed)
                future = pool.submit(_measure, out, seed, norm, cell)
                pending[future] = partial(keep, key)

        for seed, norm in jobs:
            future = pool.submit(_train, out, seed, norm)
            pending[future] = partial(trained, seed, norm)
        for step in itertools.count(1):
            done = next(iter(wait(pending, return_when=FIRST_COMPLETED).done), None)
            if done is None:
                break
            pending.pop(done)(done.result())
            progress(step, steps, "")
    return [result for key in sorted(measured) for result in measured[key]]


def _folders(out: Path, seed: int, norm: str) -> tuple[Path, Path]:
    return out / f"source-{norm}-{seed}", out / f"adapter-{norm}-{seed}"


def _train(out: Path, seed: int, norm: str) -> None:
    source_folder, adapter_folder = _folders(out, seed, norm)
    recipe = load_recipe(SourceRecipe, "demo", settings={"norm": norm})
    source = train_source(recipe, source_folder, seed=seed)
    train_adapter(source, load_recipe(AdapterRecipe, "demo"), adapter_folder, seed=seed)


def _measure(out: Path, seed: int, norm: str, cell: Cell) -> list[Result]:
    source_folder, adapter_folder = _folders(out, seed, norm)
    source, adapter = load_source(source_folder), load_adapter(adapter_folder)
    clean = load(source.card.dataset, "test")
    results = []
    for corruption in CORRUPTIONS:
        images = corrupted(clean, corruption, SEVERITY, root=out)
        for labels in LABELS:
            chosen = replace(
                cell, corruption=corruption, severity=SEVERITY, labels=labels, seed=seed
            )
            results.append(run_cell(chosen, source, adapter, images=images))
    return results
