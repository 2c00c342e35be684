"""``twoshift export`` and ``import``: results and models for other tools, and published results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from twoshift.cli import export_onnx
from twoshift.cli._options import StoreFile, one_of, when_stopped
from twoshift.registry import did_you_mean

EXAMPLE = "Example: twoshift export results results.db --to csv --out results.csv"
HELP, DEFAULT = ("-h", "--help"), "results"

FORMATS = ("csv", "parquet", "json")


class ResultsByDefault(TyperGroup):
    """``twoshift export STORE ...`` means ``twoshift export results STORE ...``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the command where the user named a store."""
        first = args[0] if args else HELP[0]
        others = [name for name in self.commands if name != DEFAULT]
        mistyped = did_you_mean(first, others) and not Path(first).exists()
        if first not in (*self.commands, *HELP) and not mistyped:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ResultsByDefault,
    no_args_is_help=True,
    help="Results and models for other tools.",
    epilog=EXAMPLE,
)
app.command("onnx", epilog=export_onnx.EXAMPLE)(export_onnx.onnx_command)


@app.command(DEFAULT, epilog=EXAMPLE)
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
