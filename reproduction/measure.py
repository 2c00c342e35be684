"""Measure the parts of tables that ``published.yaml`` names, publish them, and make every page.

    python -m reproduction.measure TABLE ... --data DIR

Takes hours on a CPU. Run again after an interruption, it continues. All tables share one store, so
that no cell is measured twice.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from reproduction import publish


def command(
    table: str, part: Mapping[str, Sequence[str]], data: Path, store: Path, models: Path
) -> list[str]:
    """The ``twoshift bench`` command that measures a part of a table."""
    folders = ["--data", data, "--store", store, "--models", models, "--checkpoints", "checkpoints"]
    filters = [f"--only={name}={','.join(values)}" for name, values in part.items()]
    start = [sys.executable, "-m", "twoshift.cli", "bench", table, "--profile", "cpu"]
    return [*start, *filters, *map(str, folders), "--launch", "processes"]


def main() -> None:
    """Measure table by table, then make every page again."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("tables", nargs="+", choices=list(publish.published()), metavar="TABLE")
    add("--data", type=Path, default="data", help="folder of the data sets")
    add("--store", type=Path, default="runs/results.db", help="store for the results")
    add("--models", type=Path, default="runs", help="folder of models trained here")
    options = parser.parse_args()
    for table in options.tables:
        for part in publish.published()[table]:
            line = command(table, part, options.data, options.store, options.models)
            subprocess.run(line, check=True)
        publish.take(table, options.store)
    publish.remake()


if __name__ == "__main__":
    main()
