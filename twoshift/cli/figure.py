"""``twoshift figure``: a figure of the paper, from results, lists or models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "Example: twoshift figure tau-boundary --out tau-boundary.svg"


def figure_command(
    name: Annotated[str | None, typer.Argument(help="Name of a figure; without it, a list")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="FILE.svg or FILE.png; NAME.svg by default")
    ] = None,
    store: Annotated[Path, typer.Option("--store", help="Where results are kept")] = Path(
        "results.db"
    ),
    profile: Annotated[str, typer.Option("--profile", help="cpu (slim) or paper")] = "cpu",
    models: Annotated[Path, typer.Option("--models", help="Where models are trained")] = Path(
        "runs"
    ),
    checkpoints: Annotated[
        list[Path] | None, typer.Option("--checkpoints", help="Folders of trained models to use")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Folder of the data sets")] = None,
) -> None:
    """Draw a figure of the paper with what was measured here."""
    from twoshift.bench.workshop import Workshop
    from twoshift.report.figures import Desk, figure_names, load_figure, make_figure

    if name is None:
        for known in figure_names():
            content = load_figure(known)
            typer.echo(f"{known:28s} {content.paper}: {content.title}")
        return
    out = out or Path(f"{name}.svg")
    make_figure(name, out, Desk(store, profile, Workshop(models, data, checkpoints or ())))
    typer.echo(f"{name} in {out}")
