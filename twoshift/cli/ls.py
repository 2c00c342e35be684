"""``twoshift ls``: methods, models, data sets, corruptions, estimators, adapters by name."""

from __future__ import annotations

import json
from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any

import typer

from twoshift.cli._options import AsJson

EXAMPLE = "Example: twoshift ls methods --json"


class Kind(StrEnum):
    """Kinds of things to list."""

    methods = "methods"
    models = "models"
    datasets = "datasets"
    corruptions = "corruptions"
    estimators = "estimators"
    adapters = "adapters"


def ls_command(
    kind: Annotated[Kind | None, typer.Argument(help="What to list; by default everything")] = None,
    as_json: AsJson = False,
) -> None:
    """List methods, models, data sets, corruptions, estimators and adapters."""
    rows = [row for k in ([kind] if kind else Kind) for row in entries(k)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    columns = ("kind", "name", "description", "needs", "settings")
    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        settings = ", ".join(f"{k}={v}" for k, v in row["settings"].items())
        needs = ", ".join(row.get("needs", []))
        table.add_row(row["kind"], f"[cyan]{row['name']}[/]", row["description"], needs, settings)
    Console().print(table)


def entries(kind: Kind) -> list[dict[str, Any]]:
    """Name, description and settings of every entry of a kind; for methods also their needs."""
    from twoshift.registry import Registry, signature_settings

    module = {Kind.datasets: "data", Kind.corruptions: "data.corruptions"}.get(kind, kind)
    registry: Registry[Any] = getattr(import_module(f"twoshift.{module}"), kind)
    return [
        {
            "kind": registry.kind,
            "name": name,
            "description": registry.describe(name),
            "settings": signature_settings(registry[name]),
            **_origin(registry[name]),
        }
        for name in registry
    ]


def _origin(entry: Any) -> dict[str, Any]:
    """Title, reference and needs, where an entry has them."""
    if not hasattr(entry, "needs"):
        return {}
    return {"title": entry.title, "reference": entry.reference, "needs": sorted(entry.needs)}
