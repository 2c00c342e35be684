"""``twoshift predict``: many images to a table of predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twoshift.cli._options import (
    ModelSettings,
    OwnModel,
    Trained,
    Weights,
    check_whose,
    tell,
    when_stopped,
)
from twoshift.cli.train import assignments, progress_bar
from twoshift.errors import SettingError

if TYPE_CHECKING:
    from twoshift.predict.build import Ready
    from twoshift.predict.inputs import Gallery

EXAMPLE = (
    "Example: twoshift predict images --model resnet50 --weights mine.safetensors "
    "--calibration facts -o predictions.parquet"
)
UNREAD = 3  # exit code: the table is complete, but some images could not be read


@when_stopped("The same command continues: what was finished is kept.")
def predict_command(
    images: Annotated[
        str,
        typer.Argument(
            help="A folder of images, a .parquet or .npz file, list:FILE, parquet:FOLDER or hf:NAME"
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The table: .parquet or .csv")],
    model: OwnModel = None,
    weights: Weights = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Folder of its facts, from: twoshift calibrate")
    ] = None,
    source: Trained = None,
    change: ModelSettings = None,
    method: Annotated[
        str, typer.Option(help="recommended, or another: see twoshift ls methods")
    ] = "recommended",
    method_change: Annotated[
        list[str] | None, typer.Option("--method-set", help="A setting of the method: lr=1e-4")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="With another method: folder of an adapter, or 'logit' ...")
    ] = None,
    estimator: Annotated[
        str | None, typer.Option(help="With an adapter: see twoshift ls estimators")
    ] = None,
    estimator_change: Annotated[
        list[str] | None,
        typer.Option("--estimator-set", help="Setting of the estimator: alpha=0.2"),
    ] = None,
    classes: Annotated[
        Path | None, typer.Option(help="Names of the classes, one per line, if not in the facts")
    ] = None,
    order: Annotated[
        str | None, typer.Option(help="name, time, given, or a column of the table")
    ] = None,
    group_by: Annotated[
        str | None, typer.Option(help="folder, or a column: each group is a stream of its own")
    ] = None,
    image_column: Annotated[str | None, typer.Option(help="Column of the images")] = None,
    id_column: Annotated[str | None, typer.Option(help="Column of their names")] = None,
    split: Annotated[str, typer.Option(help="Split of hf:NAME")] = "test",
    size: Annotated[
        int | None, typer.Option(min=1, help="Side of the images; by default as calibrated")
    ] = None,
    frame: Annotated[
        int | None, typer.Option(min=1, help="Side of the square that they are cut from")
    ] = None,
    squash: Annotated[
        bool | None, typer.Option("--squash/--crop", help="Resize both sides to the frame")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch")] = 64,
    state: Annotated[
        Path | None, typer.Option(help="Folder of the state: go on from it, and leave it there")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Columns for so many likeliest classes")] = 1,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Columns for all probabilities")
    ] = False,
    baseline: Annotated[
        bool, typer.Option(help="Run the unadapted model, too, and count what has changed")
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what was made or begun before")
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="All images are known: several passes over them")
    ] = False,
    passes: Annotated[
        int | None, typer.Option(min=1, help="Offline: number of passes", show_default="2")
    ] = None,
    launch: Annotated[
        str, typer.Option(help="Offline: who runs the parts: local, processes or dask")
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes of --launch; by default one per core")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Of --launch dask: tcp://HOST:PORT of your own cluster")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Draw the summary: page.html")] = None,
    device: Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda, mps")] = None,
) -> None:
    """Predict unlabelled images into a table, and adapt to them on the way.

    The same command continues after an interruption. Images that cannot be read have a row with the
    error, and the exit code is then 3.
    """
    from twoshift.predict.build import Recipe
    from twoshift.predict.inputs import open_gallery
    from twoshift.predict.launch import launcher
    from twoshift.predict.progress import Pace
    from twoshift.predict.run import PASSES, Options, predict
    from twoshift.predict.shards import Opening
    from twoshift.predict.summary import as_text

    _check_model(model, calibration, source)
    is_offline = offline or passes is not None or launch != "local"
    options = Options(
        out=out,
        batch_size=batch_size,
        state=state,
        top=top,
        probabilities=probabilities,
        baseline=baseline,
        overwrite=overwrite,
        passes=(passes or PASSES) if is_offline else None,
    )
    decoding = {"size": size, "frame": frame, "squash": squash}
    recipe = Recipe(
        model=model,
        weights=weights,
        calibration=None if calibration is None else str(calibration),
        source=None if source is None else str(source),
        settings=assignments(change),
        method=method,
        adapter=adapter,
        estimator=estimator,
        method_settings=assignments(method_change),
        estimator_settings=assignments(estimator_change),
        classes=None if classes is None else str(classes),
        decoding={name: value for name, value in decoding.items() if value is not None},
        device=device,
    )
    reading: dict[str, Any] = {
        "order": order,
        "group_by": group_by,
        "image_column": image_column,
        "id_column": id_column,
        "split": split,
    }
    gallery = open_gallery(images, **reading)
    opening = Opening(recipe, images, reading, gallery.identity())
    run = launcher(launch, opening, workers, scheduler)
    for note in gallery.notes:
        tell(f"note: {note}", "yellow")
    ready = recipe.open()
    typer.echo(f"method    {ready.live.describe()}")
    with progress_bar("images") as bar:
        summary = predict(ready, gallery, options, Pace(bar), run)
    typer.echo(as_text(summary))
    typer.echo(f"table     {out}")
    if report is not None:
        _draw(report, summary, gallery, ready)
        typer.echo(f"page      {report}")
    if summary["errors"]:
        raise typer.Exit(UNREAD)


def _check_model(model: str | None, calibration: Path | None, source: Path | None) -> None:
    check_whose("predict", model, source, cure=EXAMPLE)
    if model is not None and calibration is None:
        cure = "Find the facts first: twoshift calibrate --model ... --data ... --out DIR"
        raise SettingError("predict --model", must_be="given --calibration", cure=cure)


def _draw(page: Path, summary: dict[str, Any], gallery: Gallery, ready: Ready) -> None:
    from twoshift.predict.thumbnails import thumbnails
    from twoshift.report.predictions import render
    from twoshift.storage import atomic_file

    pictures = thumbnails(gallery, ready.decoding, [row[1] for row in summary["most"]])
    text = render(summary, pictures, gallery.name, ready.live.describe())
    with atomic_file(page) as temporary:
        temporary.write_text(text, encoding="utf-8")
