"""``twoshift run``: one method on one or more streams."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twoshift.cli.train import assignments, progress_bar

if TYPE_CHECKING:
    from twoshift.adapters import Adapter
    from twoshift.bench import Cell
    from twoshift.train.checkpoint import SourceModel

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
    source: Annotated[Path, typer.Option("--source", help="Folder of the source model")],
    method: Annotated[
        str | None,
        typer.Option("--method", help="See: twoshift ls methods", show_default="tent"),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter", help="Folder of the adapter, or 'identity', 'logit', 'calibrated'"
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", help="Data set of the stream; the source's own by default"),
    ] = None,
    estimator: Annotated[
        str | None,
        typer.Option("--estimator", help="See: twoshift ls estimators", show_default="ema"),
    ] = None,
    corruption: Annotated[
        str, typer.Option("--corruption", help="Name, several with commas, or clean")
    ] = "clean",
    severity: Annotated[int, typer.Option("--severity", min=1, max=5)] = 5,
    labels: Annotated[
        str,
        typer.Option(
            "--labels",
            help="forward-50, uniform, permuted-50, natural ...; several with commas",
        ),
    ] = "uniform",
    seed: Annotated[str, typer.Option("--seed", help="Of the stream; several with commas")] = "0",
    batch_size: Annotated[int, typer.Option("--batch-size", min=1)] = 64,
    order: Annotated[str, typer.Option("--order", help="shuffled or correlated")] = "shuffled",
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            help="recommended, or settings of a benchmark, e.g. cifar10-c; by default the source's",
        ),
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the method: lr=1e-4")
    ] = None,
    estimator_change: Annotated[
        list[str] | None, typer.Option("--estimator-set", help="Of the estimator: alpha=0.2")
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave unreadable images out, and count them")
    ] = False,
    data: Annotated[Path | None, typer.Option("--data", help="Folder of the data sets")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per stream")] = False,
) -> None:
    """Run a method over a corrupted, label-shifted stream and measure it."""
    from twoshift import estimators
    from twoshift.bench import Cell, presets
    from twoshift.bench.cell import UNTRAINED
    from twoshift.errors import SettingError
    from twoshift.models.norm import has_iabn
    from twoshift.train.checkpoint import load_source

    use = presets.combination(preset)
    method = method or use.get("method", "tent")
    adapter = adapter or use.get("adapter")
    estimator = estimator or use.get("estimator", "ema")
    used = adapter is not None
    if not used and (estimator != "ema" or estimator_change):
        raise SettingError(
            "an estimator tells an adapter the labels: --estimator",
            must_be="given together with --adapter, or with a method that has one",
        )
    estimators.estimators[estimator]  # a misspelling is told before any image is read
    loaded, untrained = load_source(source), (None, *UNTRAINED)
    preset = preset or presets.of_dataset(loaded.card.dataset)
    iabn = has_iabn(loaded.model)
    settings = presets.preset(
        preset, method, with_adapter=adapter not in (None, "logit", "calibrated"), with_iabn=iabn
    )
    base = Cell(
        method=method,
        settings={**settings, **assignments(change)},
        adapter=adapter if adapter in untrained else "trained",
        estimator=estimator,
        estimator_settings={
            **presets.estimator_preset(preset, estimator),
            **assignments(estimator_change),
        },
        severity=severity,
        batch_size=batch_size,
        order=order,
        target=target,
    )
    cells = [
        replace(base, corruption=c, labels=y, seed=s)
        for c, y, s in itertools.product(corruption.split(","), labels.split(","), _seeds(seed))
    ]
    given = None if adapter in untrained else load_matching(Path(str(adapter)), loaded)
    for result in _results(cells, loaded, given, data, skip_bad):
        typer.echo(json.dumps(result) if as_json else _readable(result))


def _seeds(text: str) -> list[int]:
    from twoshift.errors import SettingError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SettingError("--seed", must_be="whole numbers with commas", got=text) from None


def load_matching(folder: Path, source: SourceModel) -> Adapter:
    """Load an adapter that was trained for this very source model."""
    from twoshift.adapters import load_adapter
    from twoshift.errors import MismatchError
    from twoshift.storage import read_card

    trained_on = read_card(folder, "adapter").get("training", {}).get("source")
    if trained_on is not None and trained_on != source.weights:
        raise MismatchError(
            f"the adapter in {folder} was trained for other source weights",
            cure="Train one for this source: twoshift train adapter --source DIR --out DIR.",
        )
    return load_adapter(folder)


def _results(
    cells: list[Cell],
    source: SourceModel,
    adapter: Adapter | None,
    data: Path | None,
    skip_bad: bool,
) -> Iterator[dict[str, Any]]:
    from twoshift.bench.cell import clean_images_of, images_of, run_cell

    clean = images = None
    for i, cell in enumerate(cells):
        name = f"[{i + 1}/{len(cells)}] {cell.method} {cell.corruption} {cell.labels}"
        with progress_bar(name) as progress:
            if clean is None:
                clean = clean_images_of(cell, source, data, skip_bad=skip_bad)
            if images is None or cell.corruption != cells[i - 1].corruption:
                images = None  # gives its room to the next
                images = images_of(cell, source, data, skip_bad=skip_bad, clean=clean)
            result = run_cell(cell, source, adapter, data=data, images=images, progress=progress)
        yield result


def _readable(result: dict[str, Any]) -> str:
    cell, metrics = result["cell"], result["metrics"]
    adapter = "" if cell["adapter"] is None else f" + {cell['adapter']} adapter"
    strength = "" if cell["corruption"] == "clean" else f"-{cell['severity']}"
    stream = f"{cell['corruption']}{strength} | {cell['labels']} | seed {cell['seed']}"
    head = f"{cell['method']}{adapter} | {stream}"
    shown = [f"  {k:18s} {metrics[k]:.4f}" for k in SHOWN if metrics[k] is not None]
    facts = result["facts"]
    skipped = [f"  skipped images     {facts['skipped_images']}"] if facts["skipped_images"] else []
    return "\n".join([head, *shown, f"  pixels             {facts['pixels']}", *skipped])
