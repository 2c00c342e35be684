"""``twoshift calibrate``: what a source model's mistakes look like. The same command resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from twoshift.cli.train import Data, progress_bar

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")
EXAMPLE = "Example: twoshift calibrate --source runs/cifar10-bn --folds 5"


def calibrate_command(
    source: Annotated[Path, typer.Option("--source", help="Folder of the source model")],
    folds: Annotated[
        int, typer.Option("--folds", help="Models to train on parts of the data; 0 trains none")
    ] = 5,
    data: Data = None,
) -> None:
    """Fit calibration and confusion of a source model on its own training images.

    Each fold of them is predicted by a model trained on the others; the result is kept with the
    source model.
    """
    from twoshift.errors import ModelError
    from twoshift.methods.eata import fisher_information
    from twoshift.methods.matched import class_moments
    from twoshift.train.checkpoint import load_source
    from twoshift.train.crossfit import calibrate

    def where_possible(measure: Callable[[nn.Module, T], dict[str, Any]]) -> Any:
        def measured(model: nn.Module, batches: T) -> dict[str, Any]:
            try:
                return measure(model, batches)
            except ModelError:  # the network has not the layers that it is about
                return {}

        return measured

    with progress_bar("calibration") as progress:
        found = calibrate(
            load_source(source),
            source,
            folds=folds,
            data=data,
            fisher=where_possible(fisher_information),
            moments=where_possible(class_moments),
            progress=progress,
        )
    typer.echo(f"calibration in {source}: {'held-out' if found.held_out else 'training'} images")
    for mode in ("running", "batch"):
        part = found.of(mode)
        typer.echo(
            f"{mode:7s}  accuracy {part.accuracy:.4f}, balanced {part.balanced_accuracy:.4f}, "
            f"temperature {part.temperature:.3f}, CoTTA threshold {part.cotta_threshold:.3f}"
        )
