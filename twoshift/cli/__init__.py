"""The command line, one file per command. Torch is imported only where it is needed."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from twoshift import __version__
from twoshift.cli import (
    bench,
    calibrate,
    data,
    demo,
    export,
    figure,
    ls,
    predict,
    recipe,
    report,
    run,
    train,
)
from twoshift.cli._options import tell, when_stopped
from twoshift.errors import TwoshiftError

app = typer.Typer(
    name="twoshift",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Example: twoshift demo --out demo",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data.app, name="data")
app.add_typer(train.app, name="train")
app.add_typer(recipe.app, name="recipe")
app.add_typer(export.app, name="export")
app.command("calibrate", epilog=calibrate.EXAMPLE)(
    when_stopped("No facts were written.")(calibrate.calibrate_command)
)
app.command("ls", epilog=ls.EXAMPLE)(ls.ls_command)
app.command("run", epilog=run.EXAMPLE)(run.run_command)
app.command("predict", epilog=predict.EXAMPLE)(predict.predict_command)
app.command("bench", epilog=bench.EXAMPLE)(bench.bench_command)
app.command("demo", epilog=demo.EXAMPLE)(demo.demo_command)
app.command("import", epilog=export.IMPORT_EXAMPLE)(export.import_command)
app.command("figure", epilog=figure.EXAMPLE)(figure.figure_command)
app.command("report", epilog=report.EXAMPLE)(report.report_command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"twoshift {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Keep a classifier accurate when appearance and class frequencies shift at once."""


def main() -> None:
    """Entry point: an error that the user can fix is shown as a sentence, not as a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    try:
        app()
    except (TwoshiftError, OSError) as e:  # others are mistakes of ours, and keep their traceback
        tell(f"{type(e).__name__}: {e}")
        sys.exit(2)
