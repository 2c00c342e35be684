"""``twoshift export`` and ``import``: results for other tools, and published results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twoshift.cli._options import StoreFile, one_of, when_stopped

EXAMPLE = "Example: twoshift export results.db --to csv --out results.csv"

FORMATS = ("csv", "parquet", "json")


@when_stopped("The file was not written.")
def export_command(
    store: Annotated[Path, typer.Argument(help="File of the results")],
    to: Annotated[str, typer.Option(help="csv and parquet: a row per cell; json: JSON lines")],
    out: Annotated[Path, typer.Option(help="File to write")],
    trace: Annotated[
        bool, typer.Option("--trace", help="Include what was measured per batch; json only")
    ] = False,
) -> None:
    """Write all results of a store as CSV, Parquet or JSON lines."""
    from twoshift.bench.export import export_csv, export_parquet
    from twoshift.bench.store import Store, export_lines
    from twoshift.errors import SettingError

    one_of("format", to, FORMATS)
    if trace and to != "json":
        raise SettingError("--trace", must_be="given with --to json", got=f"--to {to}")
    with Store(store, create=False) as opened:
        if to == "csv":
            count = export_csv(opened, out)
        elif to == "parquet":
            count = export_parquet(opened, out)
        else:
            count = export_lines(opened, out, trace)
        damaged = len(opened.damaged())
    if damaged:
        typer.secho(f"left out: {damaged} damaged records", fg="yellow", err=True)
    typer.echo(f"{count} results in {out}")


IMPORT_EXAMPLE = "Example: twoshift import results.jsonl --store results.db"


@when_stopped("Nothing was imported.")
def import_command(
    lines: Annotated[Path, typer.Argument(help="JSON lines, as written by export")],
    store: StoreFile = Path("results.db"),
) -> None:
    """Add published results to a store; existing results stay."""
    from twoshift.bench.store import Store, import_lines
    from twoshift.storage import storage_errors

    with storage_errors("cannot read", lines):
        lines.open("rb").close()  # before a store is created
    with Store(store) as opened:
        count = import_lines(opened, lines)
    typer.echo(f"{count} new results in {store}")
