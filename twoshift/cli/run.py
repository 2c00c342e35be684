"""``twoshift run``: one method on one or more streams."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from twoshift.cli._options import Data, SkipBad, SourceFolder
from twoshift.cli.train import assignments, progress_bar

if TYPE_CHECKING:
    from twoshift.bench import Result

EXAMPLE = (
    "Example: twoshift run --source runs/cifar10-iabn --adapter runs/cifar10-iabn-adapter "
    "--method iabn --corruption gaussian_noise --severity 5 --labels backward-50 --seed 0"
)
SHOWN = (
    "accuracy",
    "balanced_accuracy",
    "head_recall",
    "medium_recall",
    "tail_recall",
    "ece",
    "nll",
    "prior_l1",
    "s_error_final",
    "ms_per_batch_p50",
)


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
    corruption: Annotated[str, typer.Option(help="clean, or names separated by commas")] = "clean",
    severity: Annotated[int, typer.Option(min=1, max=5)] = 5,
    labels: Annotated[
        str, typer.Option(help="forward-50, uniform, permuted-50, natural ...; separated by commas")
    ] = "uniform",
    seed: Annotated[str, typer.Option(help="Seeds of the stream, with commas")] = "0",
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    order: Annotated[str, typer.Option(help="shuffled or correlated")] = "shuffled",
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
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per stream")] = False,
) -> None:
    """Run a method over a corrupted, label-shifted stream and measure it."""
    from twoshift.adapters import load_adapter
    from twoshift.bench import make_cell, presets, run_cell
    from twoshift.bench.cell import TRAINED
    from twoshift.bench.images import ImageCache
    from twoshift.bench.request import untrained_adapters
    from twoshift.models.norm import has_iabn
    from twoshift.train.checkpoint import load_source

    streams = list(itertools.product(corruption.split(","), labels.split(","), _seeds(seed)))
    loaded = load_source(source)
    is_folder = adapter is not None and adapter not in untrained_adapters()
    kind = TRAINED if is_folder else adapter
    names = {"method": method, "adapter": kind, "estimator": estimator}
    base = make_cell(
        preset or presets.of_dataset(loaded.card.dataset),
        settings=assignments(change),
        estimator_settings=assignments(estimator_change),
        with_iabn=has_iabn(loaded.model),
        severity=severity,
        batch_size=batch_size,
        order=order,
        target=target,
        **{field: name for field, name in names.items() if name is not None},
    )
    cells = [replace(base, corruption=c, labels=y, seed=s) for c, y, s in streams]
    trained = load_adapter(str(adapter)) if is_folder else None
    images = ImageCache(data, skip_bad)
    for i, cell in enumerate(cells, 1):
        name = f"[{i}/{len(cells)}] {cell.method} {cell.corruption} {cell.labels}"
        with progress_bar(name) as progress:
            result = run_cell(cell, loaded, trained, images=images, progress=progress)
        typer.echo(json.dumps(result.to_json()) if as_json else _readable(result))


def _seeds(text: str) -> list[int]:
    from twoshift.errors import SettingError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SettingError("--seed", must_be="whole numbers, with commas", got=text) from None


def _readable(result: Result) -> str:
    cell, metrics, facts = result.cell, result.metrics, result.facts
    adapter = "" if cell.adapter is None else f" + {cell.adapter} adapter"
    strength = "" if cell.corruption == "clean" else f"-{cell.severity}"
    stream = f"{cell.corruption}{strength} | {cell.labels} | seed {cell.seed}"
    lines = [f"{cell.method}{adapter} | {stream}"]
    lines += [f"  {k:18s} {metrics[k]:.4f}" for k in SHOWN if metrics[k] is not None]
    lines.append(f"  pixels             {facts['pixels']}")
    if facts["skipped_images"]:
        lines.append(f"  skipped images     {facts['skipped_images']}")
    return "\n".join(lines)
