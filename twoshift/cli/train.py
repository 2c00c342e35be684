"""``twoshift train``: source models and adapters. The same command resumes a training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from twoshift.cli._options import Data, SkipBad, SourceFolder, is_first, when_stopped
from twoshift.errors import SettingError

app = typer.Typer(
    help="Train a source model, then its adapter.",
    no_args_is_help=True,
    epilog="Example: twoshift train source --recipe demo --out runs/digits",
)

Out = Annotated[Path, typer.Option("--out", help="Folder of the result")]
Recipe = Annotated[str, typer.Option("--recipe", help="Name of a recipe, or a YAML file")]
Change = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting of the recipe: epochs=10")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of initialisation, order and augmentation")]
Devices = Annotated[
    int,
    typer.Option("--devices", min=1, help="GPUs, or else processes, that share each batch"),
]

STOPPED = "The same command continues after the last epoch that was finished."


@app.command(
    "source",
    epilog="Example: twoshift train source --recipe cifar-cpu --set settings.norm=iabn "
    "--out runs/cifar10-iabn",
)
@when_stopped(STOPPED)
def source_command(
    out: Out,
    recipe: Recipe = "cifar-cpu",
    change: Change = None,
    seed: Seed = 0,
    data: Data = None,
    devices: Devices = 1,
    skip_bad: SkipBad = False,
) -> None:
    """Train a classifier on a long-tailed data set."""
    from twoshift.train.recipes import SourceRecipe, load_recipe

    chosen = load_recipe(SourceRecipe, recipe, **assignments(change))
    if _spread(devices):
        return
    from twoshift.train.source import train_source

    with progress_bar("source") as progress:
        source = train_source(
            chosen, out, seed=seed, data=data, skip_bad=skip_bad, progress=progress
        )
    facts = [f"{name} {value:.4g}" for name, value in source.card.measured.items()]
    if skip_bad:
        facts.append(f"skipped {source.card.subset.get('skipped', 0):,}")
    if is_first():
        typer.echo(f"source model in {out}{': ' if facts else ''}{', '.join(facts)}")


@app.command(
    "adapter",
    epilog="Example: twoshift train adapter --source runs/cifar10-bn --out runs/cifar10-bn-adapter",
)
@when_stopped(STOPPED)
def adapter_command(
    source: SourceFolder,
    out: Out,
    recipe: Recipe = "cifar-cpu",
    change: Change = None,
    seed: Seed = 0,
    data: Data = None,
    devices: Devices = 1,
) -> None:
    """Train the label shift adapter of a source model, on the training images of that model."""
    from twoshift.train.recipes import AdapterRecipe, load_recipe

    chosen = load_recipe(AdapterRecipe, recipe, **assignments(change))
    if _spread(devices):
        return
    from twoshift.train.adapter import train_adapter
    from twoshift.train.checkpoint import load_source

    with progress_bar("adapter") as progress:
        adapter = train_adapter(
            load_source(source), chosen, out, seed=seed, data=data, progress=progress
        )
    count = sum(p.numel() for p in adapter.parameters())
    if is_first():
        typer.echo(f"adapter in {out}: {count:,} parameters")


def _spread(devices: int) -> bool:
    """Run this command in several processes, unless this is one of them."""
    from twoshift.train.devices import launch, processes

    if devices in (1, processes()):
        return False
    launch(devices, sys.argv[1:])
    return True


def assignments(pairs: list[str] | None) -> dict[str, Any]:
    """``["lr=0.1", "settings.norm=iabn"]`` as a nested dictionary; values are YAML scalars."""
    from twoshift.train._yaml import parse_yaml

    result: dict[str, Any] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SettingError("a setting on the command line", must_be="NAME=VALUE", got=pair)
        place = result
        *parents, last = key.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise SettingError(f"setting {parent!r}", must_be="a value or a group, not both")
        place[last] = parse_yaml(value, f"value of {key}")
        if isinstance(place[last], str):  # YAML 1.1 reads 1e-3 as a string
            with suppress(ValueError):
                place[last] = float(value)
    return result


class Report(Protocol):
    """Updates a progress bar."""

    def __call__(self, done: int, total: int | None, facts: str = "") -> None:
        """Show how much is done, and ``facts`` beside the bar."""


@contextmanager
def progress_bar(name: str, download: bool = False) -> Iterator[Report]:
    """A bar on standard error, with what the work reports, or the bytes of a download."""
    from rich import progress
    from rich.console import Console

    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn() if download else progress.MofNCompleteColumn(),
        progress.TransferSpeedColumn() if download else progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[facts]}"),
        console=Console(stderr=True),
        disable=not is_first(),
    ) as bar:
        task = bar.add_task(name, total=None, facts="")
        yield lambda done, total, facts="": bar.update(
            task, completed=done, total=total, facts=facts
        )
