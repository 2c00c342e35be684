"""What several commands have: options, choices, and what they say when they are stopped."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from twoshift.errors import SettingError, UnknownName
from twoshift.registry import near_miss

INTERRUPTED = 130  # as shells count Ctrl-C
P = ParamSpec("P")

Data = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of the data sets; by default $TWOSHIFT_DATA or the cache"),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out images that cannot be read, and count them")
]
OwnModel = Annotated[
    str | None,
    typer.Option(
        "--model", help="Your model: FILE.py:FUNCTION, one of ours, hf:FOLDER or timm:NAME"
    ),
]
Weights = Annotated[
    str | None,
    typer.Option("--weights", help="Its weights: a .pth or .safetensors file, or 'package'"),
]
ModelSettings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of the model, or argument of FUNCTION: width=16"),
]
Trained = Annotated[
    Path | None,
    typer.Option("--source", help="Instead: folder of a model that twoshift trained"),
]
SourceFolder = Annotated[Path, typer.Option("--source", help="Folder of the source model")]
StoreFile = Annotated[Path, typer.Option("--store", help="File of the results")]
Profile = Annotated[str, typer.Option("--profile", help="cpu (slim) or paper")]
Models = Annotated[Path, typer.Option("--models", help="Folder in which models are trained")]
Checkpoints = Annotated[
    list[Path] | None, typer.Option("--checkpoints", help="Folders of trained models to use")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON: a list of objects")]


def is_first() -> bool:
    """Whether this is the first of the processes that torchrun started: only it reports."""
    return os.environ.get("RANK", "0") == "0"


def tell(text: str, colour: str = "red") -> None:
    """A message on standard error; in colour where a terminal shows it and nobody minds."""
    typer.echo(text if os.environ.get("NO_COLOR") else typer.style(text, fg=colour), err=True)


def one_of(what: str, value: str, known: Iterable[str]) -> str:
    """Return a choice; an unknown one is an error that names the nearest.

    Args:
        what: What is chosen, for messages.
        value: What the user typed.
        known: What there is.
    """
    names = list(map(str, known))
    if value not in names:
        raise UnknownName(f"unknown {what} {value!r}", cure=near_miss(value, names))
    return value


def check_whose(
    command: str, model: str | None, source: Path | None, cure: str | None = None
) -> None:
    """Refuse a command without a model, or with two."""
    if (model is None) == (source is None):
        got = "both" if model else "neither"
        raise SettingError(command, must_be="given --model or --source", got=got, cure=cure)


def when_stopped(says: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorator of a command: what it says after Ctrl-C, which must be true of that command."""

    def decorate(command: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(command)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                command(*args, **kwargs)
            except KeyboardInterrupt:
                if is_first():
                    tell(f"Stopped. {says}", "yellow")
                raise typer.Exit(INTERRUPTED) from None

        run.__dict__["when_stopped"] = says  # so that every command can be asked
        return run

    return decorate
