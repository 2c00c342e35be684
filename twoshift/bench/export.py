"""Results as flat tables for other tools: one row per cell, nested settings as JSON."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from twoshift.bench.store import Result, Store
from twoshift.errors import MissingExtra
from twoshift.storage import atomic_file

Row = dict[str, Any]


def flat(result: Result) -> Row:
    """Fields of the cell and metrics by their names; source model and facts with a prefix."""
    row = {
        "key": result["key"],
        **result["cell"],
        **{f"source_{k}": v for k, v in result["source"].items()},
        "adapter_weights": result.get("adapter"),
        **result["metrics"],
        **{f"facts_{k}": v for k, v in result.get("facts", {}).items()},
    }
    return {k: json.dumps(v) if isinstance(v, dict | list) else v for k, v in row.items()}


def rows(store: Store) -> list[Row]:
    """All results, flat, with the same columns; None where a result has no such value."""
    found = [flat(result) for result in store.results()]
    columns = dict.fromkeys(name for row in found for name in row)
    return [{name: row.get(name) for name in columns} for row in found]


def export_csv(store: Store, path: str | Path) -> int:
    """Write all results as comma-separated values.

    Returns:
        How many.
    """
    found = rows(store)
    with atomic_file(Path(path)) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0] if found else ["key"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    return len(found)


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

    found = rows(store)
    with atomic_file(Path(path)) as temporary:
        parquet.write_table(pyarrow.Table.from_pylist(found), temporary)
    return len(found)
