"""Ways to run cells: a launcher takes a workshop and cells, and yields outcomes as they finish."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from twoshift.bench.launch.base import Outcome
from twoshift.bench.launch.dask import launch_dask
from twoshift.bench.launch.local import launch_local
from twoshift.bench.launch.processes import launch_processes
from twoshift.bench.launch.slurm import launch_slurm
from twoshift.errors import SettingError, UnknownName
from twoshift.registry import near_miss

__all__ = ["Outcome", "launcher", "launchers"]

Launcher = Callable[..., Iterator[Outcome]]
launchers: dict[str, Launcher] = {
    "local": launch_local,
    "processes": launch_processes,
    "dask": launch_dask,
    "slurm": launch_slurm,
}


def launcher(name: str, options: Mapping[str, Any] | None = None) -> Launcher:
    """A launcher by name, with its options; an unknown option is an error."""
    if name not in launchers:
        raise UnknownName(f"unknown launcher {name!r}", cure=near_miss(name, launchers))
    for option in options or {}:
        owners = [n for n, run in launchers.items() if option in inspect.signature(run).parameters]
        if name not in owners:
            cure = f"It is an option of {', '.join(owners)}." if owners else None
            raise SettingError(f"launcher {name!r} has no option {option!r}", cure=cure)
    return partial(launchers[name], **(options or {}))
