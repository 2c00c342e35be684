"""Settings of DART's training that its publication does not give us, chosen on selection streams.

    python -m reproduction.dart --data DIR

Trains DART's network for the source model ``cifar10-bn`` in a few variants, and measures each on
the streams of ``selection-streams-cifar10``: no test image, none of the 15 corruptions. About four
minutes a variant on a core; run again after an interruption, it continues.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from reproduction import markdown
from twoshift.bench.images import ImageCache
from twoshift.bench.measure import run_cell
from twoshift.bench.provenance import revision
from twoshift.bench.table import load_table
from twoshift.calibration import calibration_of, fit_dart, save_calibration
from twoshift.report.columns import heading
from twoshift.storage import atomic_file
from twoshift.train.adapter import source_images
from twoshift.train.checkpoint import SourceModel, load_source

FILE = Path("results/dart-selection.json")
SOURCE, TABLE, ROW = "cifar10-bn", "selection-streams-cifar10", "BN Stats"
LEFT_OUT = "one by one"  # the network reads batches
# all of them, so that another default leaves the variants as they are
COMMON = {"epochs": 50, "batches": 100, "batch_size": 64, "hidden": 1000, "pull": 0.1, "seed": 0}
VARIANTS: dict[str, dict[str, float]] = {
    f"concentration {concentration:g}, lr {lr:g}": {
        **COMMON,
        "concentration": concentration,
        "lr": lr,
    }
    for concentration, lr in ((0.1, 1e-3), (1.0, 1e-3), (1.0, 1e-4), (0.1, 1e-4))
}
Row = dict[str, Any]


def accuracies(
    source: SourceModel, dart: Mapping[str, Tensor], images: ImageCache
) -> tuple[dict[str, float], Row]:
    """Accuracy in percent by column, the mean over its streams, and the facts of the last run."""
    table, known = load_table(TABLE), calibration_of(source)
    assert known is not None
    columns = [column for column in table.columns if column != LEFT_OUT]
    found: dict[str, list[float]] = {column: [] for column in columns}
    with tempfile.TemporaryDirectory() as folder:  # a copy of the facts, with this network
        save_calibration(folder, replace(known, facts={**known.facts, "dart": dict(dart)}))
        trial = replace(source, folder=Path(folder))
        # in place of BN Stats, which it refines: the same streams
        for cell in table.cells("cpu", only={"row": [ROW], "column": columns}):
            result = run_cell(replace(cell, method="dart", settings={}), trial, images=images)
            found[table.column_of(cell)].append(100 * result.accuracy)
    return {column: float(np.mean(each)) for column, each in found.items()}, result.facts


def measure_variant(source: SourceModel, settings: Mapping[str, Any], images: ImageCache) -> Row:
    """Train a variant on the images of ``twoshift calibrate --also dart``, and measure it."""
    begun = time.monotonic()
    dart = fit_dart(source.model, source_images(source, images.data), **settings)
    trained = time.monotonic()
    accuracy, facts = accuracies(source, dart, images)
    return {
        "settings": dict(settings),
        "accuracy": accuracy,
        "mean": float(np.mean([*accuracy.values()])),
        "training_seconds": round(trained - begun, 3),
        "facts": {**facts, "seconds": round(time.monotonic() - begun, 3)},
    }


def measure(data: Path, checkpoints: Path, file: Path = FILE) -> None:
    """Measure all variants that a record of the same source model lacks, and write each."""
    revision()  # of the code that measures, should it change meanwhile
    source, images = load_source(checkpoints / SOURCE), ImageCache(data)
    record = json.loads(file.read_text()) if file.exists() else {}
    known = record.get("variants", {}) if record.get("source") == source.weights else {}
    done = {n: row for n, row in known.items() if row["settings"] == VARIANTS.get(n)}
    for name, settings in VARIANTS.items():
        if name in done:
            continue
        done[name] = measure_variant(source, settings, images)
        variants = {n: done[n] for n in VARIANTS if n in done}
        record = {"source": source.weights, "variants": variants, "chosen": chosen(variants)}
        with atomic_file(file) as temporary:
            temporary.write_text(json.dumps(record, indent=1) + "\n")


def chosen(variants: Mapping[str, Row]) -> str | None:
    """The variant of the highest mean; None until all are measured."""
    if variants.keys() != VARIANTS.keys():
        return None
    return max(variants, key=lambda name: variants[name]["mean"])


def read(file: Path = FILE) -> Row | None:
    """The record; None if nothing was measured."""
    return json.loads(file.read_text()) if file.exists() else None


def section(record: Mapping[str, Any] | None) -> str:
    """All variants as a table, the chosen one in bold."""
    if record is None:
        return "Not measured.\n"
    rows = []
    for name, row in record["variants"].items():
        entries = [name, *(f"{value:.1f}" for value in (*row["accuracy"].values(), row["mean"]))]
        rows.append([f"**{e}**" for e in entries] if name == record["chosen"] else entries)
    columns = next(iter(record["variants"].values()))["accuracy"]
    return markdown.table(["variant", *map(heading, columns), "mean"], rows)


def main() -> None:
    """Measure, and write the record after every variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default="data", help="folder of the data sets")
    add("--checkpoints", type=Path, default="checkpoints", help="folder of the source models")
    options = parser.parse_args()
    measure(options.data, options.checkpoints)


if __name__ == "__main__":
    main()
