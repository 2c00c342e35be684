"""``twoshift run``: one method on one or more streams."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twoshift.cli._options import Data, SkipBad, SourceFolder, one_of, when_stopped
from twoshift.cli.train import assignments, progress_bar
from twoshift.errors import SettingError
from twoshift.registry import did_you_mean

if TYPE_CHECKING:
    from twoshift.bench.cell import Cell

EXAMPLE = (
    "Example: twoshift run --source runs/cifar10-iabn --adapter runs/cifar10-iabn-adapter "
    "--method iabn --corruption gaussian_noise --severity 5 --labels backward-50 --seed 0"
)


@when_stopped("Streams that were printed are complete; results are printed, not stored.")
def run_command(
    source: SourceFolder,
    method: Annotated[
        str | None, typer.Option(help="See: twoshift ls methods", show_default="tent")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="Folder of the adapter, or 'identity', 'logit', 'calibrated'")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Data set of the stream; by default that of the source")
    ] = None,
    estimator: Annotated[
        str | None, typer.Option(help="See: twoshift ls estimators", show_default="ema")
    ] = None,
    corruption: Annotated[
        str, typer.Option(help="clean, or names separated by commas; fog+clean+snow: in turn")
    ] = "clean",
    severity: Annotated[int, typer.Option(min=1, max=5)] = 5,
    labels: Annotated[
        str, typer.Option(help="forward-50, uniform, drift-50, natural ...; separated by commas")
    ] = "uniform",
    seed: Annotated[str, typer.Option(help="Seeds of the stream, with commas")] = "0",
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    images: Annotated[int | None, typer.Option(min=1, help="At most so many images")] = None,
    order: Annotated[
        str, typer.Option(help="shuffled, bursts-0.1, sorted ...; see: twoshift ls orders")
    ] = "shuffled",
    preset: Annotated[
        str | None,
        typer.Option(
            help="recommended, or a benchmark such as cifar10-c; by default that of the source"
        ),
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the method: lr=1e-4")
    ] = None,
    estimator_change: Annotated[
        list[str] | None,
        typer.Option("--estimator-set", help="Setting of the estimator: alpha=0.2"),
    ] = None,
    skip_bad: SkipBad = False,
    data: Data = None,
    baseline: Annotated[
        bool, typer.Option(help="Show the unadapted model beside; not with --json")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per stream")] = False,
) -> None:
    """Run a method over a corrupted, label-shifted stream and measure it."""
    from twoshift.adapters import load_adapter
    from twoshift.bench import make_cell, presets, run_cell
    from twoshift.bench.cell import TRAINED
    from twoshift.bench.images import ImageCache
    from twoshift.bench.request import check_cell
    from twoshift.models.norm import has_iabn
    from twoshift.report.one_run import LEGEND, as_text
    from twoshift.train.checkpoint import load_source

    if method == "recommended":
        cure = "It is a combination: leave out --method, and give --preset recommended."
        raise SettingError("--method", must_be="one method", got=method, cure=cure)
    streams = list(itertools.product(corruption.split(","), labels.split(","), _seeds(seed)))
    loaded = load_source(source)
    is_folder = adapter is not None and _is_folder(adapter)
    kind = TRAINED if is_folder else adapter
    names = {"method": method, "adapter": kind, "estimator": estimator}
    base = make_cell(
        preset or presets.of_dataset(loaded.card.dataset),
        settings=assignments(change),
        estimator_settings=assignments(estimator_change),
        with_iabn=has_iabn(loaded.model),
        severity=severity,
        batch_size=batch_size,
        images=images,
        order=order,
        target=target,
        **{field: name for field, name in names.items() if name is not None},
    )
    cells = [replace(base, corruption=c, labels=y, seed=s) for c, y, s in streams]
    for cell in cells:
        check_cell(cell)  # all of them, before the first is measured
    trained = load_adapter(str(adapter)) if is_folder else None
    cache = ImageCache(data, skip_bad)
    for i, cell in enumerate(cells, 1):
        name = f"[{i}/{len(cells)}] {cell.method} {cell.corruption} {cell.labels}"
        with progress_bar(name) as progress:
            result = run_cell(cell, loaded, trained, images=cache, progress=progress)
        if as_json:
            typer.echo(json.dumps(result.to_json()))
            continue
        beside, plain = None, unadapted(cell)
        if baseline and plain != cell:
            beside = run_cell(plain, loaded, images=cache)
        typer.echo(f"{as_text(result, beside)}\n")
    if not as_json:
        typer.echo(LEGEND)


def unadapted(cell: Cell) -> Cell:
    """The source model as it is, on the stream of a cell."""
    from twoshift.bench.request import DEFAULT

    names: dict[str, Any] = {**DEFAULT, "method": "source"}
    return replace(cell, **names, settings={}, estimator_settings={})


def _is_folder(adapter: str) -> bool:
    """Whether an adapter is a folder, and not the name of one that needs no training."""
    from twoshift.bench.request import untrained_adapters

    known = untrained_adapters()
    if did_you_mean(adapter, known) and not Path(adapter).exists():
        one_of("adapter", adapter, known)
    return adapter not in known


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SettingError("--seed", must_be="whole numbers, with commas", got=text) from None
