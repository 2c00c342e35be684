"""``twoshift figure``: a figure of the paper, from results, lists or models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twoshift.cli._options import Checkpoints, Data, Models, Profile, StoreFile, when_stopped

if TYPE_CHECKING:
    from twoshift.bench.figure_file import Desk, FigureFile

EXAMPLE = "Example: twoshift figure tau-boundary --out tau-boundary.svg"


@when_stopped("The figure was not written; models that were trained for it are kept.")
def figure_command(
    name: Annotated[str | None, typer.Argument(help="Name of a figure; without it, a list")] = None,
    out: Annotated[
        Path | None, typer.Option(help="FILE.svg or FILE.png; NAME.svg by default")
    ] = None,
    store: StoreFile = Path("results.db"),
    profile: Profile = "cpu",
    models: Models = Path("runs"),
    checkpoints: Checkpoints = None,
    data: Data = None,
) -> None:
    """Draw a figure of the paper with your own results."""
    from twoshift.bench.figure_file import Desk, figure_names, load_figure
    from twoshift.bench.workshop import Workshop

    if name is None:
        for known in figure_names():
            content = load_figure(known)
            typer.echo(f"{known:28s} {content.paper}: {content.title}")
        return
    out = out or Path(f"{name}.svg")
    make_figure(name, out, Desk(store, profile, Workshop(models, data, checkpoints or ())))
    typer.echo(f"{name} in {out}")


def make_figure(name: str, out: Path, desk: Desk) -> None:
    """Make a figure and write it as SVG or PNG."""
    from twoshift.bench.figure_file import load_figure
    from twoshift.report import draw

    content = load_figure(name)
    draw.check_format(out)
    draw.save(drawn(name, content, desk), out)


def drawn(name: str, content: FigureFile, desk: Desk) -> Any:
    """The matplotlib figure that a file describes."""
    from twoshift.registry import check_settings
    from twoshift.report import figures

    makers: dict[str, Callable[..., Any]] = {
        "accuracy": figures.accuracy,
        "labels": figures.labels,
        "estimate": figures.estimate,
        "boundary": boundary,
        "features": features,
    }
    maker = makers[content.draw]
    check_settings(f"figure {name!r}", maker, content.inputs)
    return maker(desk, content.title, **content.inputs)


def boundary(desk: Desk, title: str, *, taus: Sequence[float], seed: int = 0) -> Any:
    """Decision boundary against tau, on a toy problem that is trained for it."""
    from twoshift.bench.toy import boundary_map, train_boundaries
    from twoshift.report import draw

    return draw.boundaries(**boundary_map(train_boundaries(taus, seed))._asdict(), title=title)


def features(
    desk: Desk,
    title: str,
    *,
    table: str,
    rows: Sequence[str],
    corruption: str,
    shift: str,
    images: int,
) -> Any:
    """Maps (t-SNE) of the features of adapted models, over the last images of a stream."""
    from twoshift.bench.embed import feature_maps
    from twoshift.report import draw

    cells = desk.cells(table, rows, corruption, [shift])
    cure = desk.command(table, **desk.filters(table, rows, corruption, [shift]))
    by_row = {row: cell for (row, _), cell in cells.items()}
    return draw.maps(*feature_maps(by_row, desk.workshop, images, cure), title)
