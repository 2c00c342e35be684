"""Results as flat tables for other tools: one row per cell, with nested settings as JSON."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from twoshift.bench.result import Result
from twoshift.bench.store import Store
from twoshift.errors import MissingExtra
from twoshift.storage import atomic_file


def flat(result: Result) -> dict[str, Any]:
    """A row: fields of the cell and metrics by name; source model and facts with a prefix."""
    content = result.to_json()
    # the metric of the same name says how many images there were; records leave out the default
    content["cell"]["most_images"] = content["cell"].pop("images", None)
    row = {
        "key": result.key,
        **dict(sorted(content["cell"].items())),
        **{f"source_{k}": v for k, v in sorted(content["source"].items())},
        "adapter_weights": result.adapter,
        **result.metrics,
        **{f"facts_{k}": v for k, v in result.facts.items()},
    }
    return {k: json.dumps(v) if isinstance(v, dict | list) else v for k, v in row.items()}


def csv_cell(value: Any) -> Any:
    """A value for CSV; a spreadsheet would take text with such a start for a formula and run it."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def rows(store: Store) -> list[dict[str, Any]]:
    """All results as rows with the same columns; None where a result lacks a value."""
    all_rows = [flat(result) for result in store.results()]
    columns = dict.fromkeys(name for row in all_rows for name in row)
    return [{name: row.get(name) for name in columns} for row in all_rows]


def export_csv(store: Store, path: str | Path) -> int:
    """Write all results as comma-separated values.

    Returns:
        How many.
    """
    lines = rows(store)
    with (
        atomic_file(Path(path)) as temporary,
        temporary.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(map(csv_cell, lines[0] if lines else ["key"]))
        writer.writerows(map(csv_cell, line.values()) for line in lines)
    return len(lines)


def export_parquet(store: Store, path: str | Path) -> int:
    """Write all results as Parquet.

    Returns:
        How many.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as e:
        raise MissingExtra("Parquet needs pyarrow", cure="pip install 'twoshift[parquet]'") from e

    lines = rows(store)
    with atomic_file(Path(path)) as temporary:
        parquet.write_table(pyarrow.Table.from_pylist(lines), temporary)
    return len(lines)
