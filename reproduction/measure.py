"""Measure what ``published.yaml`` names of a table, publish it, and make every page anew.

    python -m reproduction.measure TABLE ... --data DIR

Hours on a CPU. Given again, it goes on; tables share a store, so that no cell is measured twice.
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
    """``twoshift bench`` for a part of a table."""
    folders = ["--data", data, "--store", store, "--models", models, "--checkpoints", "checkpoints"]
    only = [
        word for name, values in part.items() for word in ("--only", f"{name}={','.join(values)}")
    ]
    start = [sys.executable, "-m", "twoshift.cli", "bench", table, "--profile", "cpu"]
    return [*start, *only, *map(str, folders), "--launch", "processes"]


def main() -> None:
    """Table by table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="+", choices=list(publish.published()), metavar="TABLE")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the data sets")
    parser.add_argument("--store", type=Path, default=Path("runs/results.db"), help="of results")
    parser.add_argument("--models", type=Path, default=Path("runs"), help="where they are trained")
    given = parser.parse_args()
    for table in given.tables:
        for part in publish.published()[table]:
            line = command(table, part, given.data, given.store, given.models)
            subprocess.run(line, check=True)
        publish.take(table, given.store)
    publish.remake()


if __name__ == "__main__":
    main()
