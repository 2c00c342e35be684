"""``twoshift calibrate``: compute the facts of a source model. The same command resumes."""

from __future__ import annotations

from typing import Annotated

import typer

from twoshift.cli._options import Data, SourceFolder
from twoshift.cli.train import progress_bar

EXAMPLE = "Example: twoshift calibrate --source runs/cifar10-bn --folds 5"


def calibrate_command(
    source: SourceFolder,
    folds: Annotated[
        int, typer.Option(help="Models to train on parts of the data; 0 trains none")
    ] = 5,
    data: Data = None,
) -> None:
    """Compute what methods and estimators must know about a source model.

    Every fold of its training images is predicted by a model trained on the others; the result is
    saved with the source model. Run again, it adds facts that a calibration lacks.
    """
    from twoshift.calibration import crossfit
    from twoshift.train.checkpoint import load_source

    with progress_bar("calibration") as progress:
        calibration = crossfit(load_source(source), folds=folds, data=data, progress=progress)
    images = "held-out" if calibration.held_out else "training"
    typer.echo(f"calibration in {source}: {images} images")
    for statistics in ("running", "batch"):
        facts = calibration.of(statistics)
        typer.echo(
            f"{statistics:7s}  accuracy {facts['accuracy']:.4f}, "
            f"balanced {facts['balanced_accuracy']:.4f}, "
            f"temperature {facts['temperature']:.3f}, "
            f"confidence threshold {facts['confidence_threshold']:.3f}"
        )
