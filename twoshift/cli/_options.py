"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Data = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of the data sets; by default $TWOSHIFT_DATA or the cache"),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out images that cannot be read, and count them")
]
SourceFolder = Annotated[Path, typer.Option("--source", help="Folder of the source model")]
StoreFile = Annotated[Path, typer.Option("--store", help="File of the results")]
Profile = Annotated[str, typer.Option("--profile", help="cpu (slim) or paper")]
Models = Annotated[Path, typer.Option("--models", help="Folder in which models are trained")]
Checkpoints = Annotated[
    list[Path] | None, typer.Option("--checkpoints", help="Folders of trained models to use")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON: a list of objects")]
