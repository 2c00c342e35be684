"""Results as runs of an experiment tracker: MLflow or TensorBoard."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from twoshift.bench.cell import CLEAN
from twoshift.bench.export import flat
from twoshift.bench.result import Result
from twoshift.errors import MissingExtra, StorageError, UnknownName
from twoshift.registry import near_miss

CURVES = ("accuracy", "s")  # parts of the trace with one number per batch
BATCH = 1000  # most metrics that MLflow accepts at once


class Tracker(Protocol):
    """Logs results."""

    def log(self, result: Result) -> None:
        """Log a result as a run: its settings, metrics and curves."""

    def close(self) -> None:
        """Finish."""


def tracker(kind: str, name: str, folder: str | Path) -> Tracker:
    """A tracker that keeps its files in ``folder``.

    Args:
        kind: ``"mlflow"`` (in ``mlflow.db``, unless ``MLFLOW_TRACKING_URI`` names a server) or
            ``"tensorboard"``.
        name: Name of the experiment, for example that of the table.
        folder: Folder of the files; created if necessary.
    """
    if kind not in trackers:
        raise UnknownName(f"unknown tracker {kind!r}", cure=near_miss(kind, trackers))
    folder = Path(folder).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return trackers[kind](name, folder)
    except ImportError as e:
        cure = f"pip install 'twoshift[{kind}]'"
        raise MissingExtra(f"--track {kind} needs {e.name}", cure=cure) from e
    except OSError as e:
        raise StorageError(f"cannot write {folder}: {e}", cure="Choose another folder.") from e


class MLflow:
    """One MLflow run per cell, in an experiment of the given name."""

    def __init__(self, name: str, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # results are private
        import mlflow

        if not (uri := os.environ.get("MLFLOW_TRACKING_URI")):
            import alembic  # noqa: F401  (a slim MLflow lacks what its database needs)
            import sqlalchemy  # noqa: F401

            uri = f"sqlite:///{folder / 'mlflow.db'}"
        self._mlflow = mlflow
        with self._errors():
            self._client = client = mlflow.MlflowClient(tracking_uri=uri)
            known = client.get_experiment_by_name(name)
            self._experiment = known.experiment_id if known else client.create_experiment(name)

    def log(self, result: Result) -> None:
        """Log a run: settings are parameters, the number of a batch is a metric's step."""
        entities, now = self._mlflow.entities, int(1000 * time.time())
        params = [entities.Param(k, str(v)) for k, v in _settings(result).items()]
        metrics = [entities.Metric(k, v, now, step) for k, v, step in _points(result)]
        with self._errors():
            run = self._client.create_run(self._experiment, run_name=title(result)).info.run_id
            self._client.log_batch(run, params=params)
            for start in range(0, len(metrics), BATCH):
                self._client.log_batch(run, metrics=metrics[start : start + BATCH])
            self._client.set_terminated(run)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._mlflow.exceptions.MlflowException as e:
            cure = "Results are safe in the store: continue without."
            raise StorageError(f"MLflow refuses: {e}", cure=cure) from e

    def close(self) -> None:
        """Do nothing: every run is finished already."""


class TensorBoard:
    """One folder of events per cell, so that cells are runs that can be selected and compared."""

    def __init__(self, name: str, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer, self._folder = SummaryWriter, folder / name

    def log(self, result: Result) -> None:
        """Log a run: curves as scalars, settings and metrics as hyper-parameters."""
        run = self._folder / f"{title(result).replace(' ', '/')}-{result.key[:8]}"
        with self._writer(str(run)) as writer:
            for name, value, step in _points(result):
                writer.add_scalar(name, value, step)
            settings = {k: str(v) for k, v in _settings(result).items()}
            writer.add_hparams(settings, {"hparam/accuracy": result.accuracy}, run_name=".")

    def close(self) -> None:
        """Do nothing: every file is closed already."""


trackers: dict[str, Callable[[str, Path], Tracker]] = {"mlflow": MLflow, "tensorboard": TensorBoard}


def title(result: Result) -> str:
    """The name of a run: ``tent+trained contrast-5 backward-50 bursts-0.1 seed0``."""
    cell = result.cell
    method = cell.method if cell.adapter is None else f"{cell.method}+{cell.adapter}"
    strength = "" if cell.corruption == CLEAN else f"-{cell.severity}"
    arrival = f" {cell.arrival}" if cell.arrival else ""
    return f"{method} {cell.corruption}{strength} {cell.labels}{arrival} seed{cell.seed}"


def _settings(result: Result) -> dict[str, Any]:
    return {k: v for k, v in flat(replace(result, metrics={})).items() if v is not None}


def _points(result: Result) -> Iterator[tuple[str, float, int]]:
    """Name, value and step of every number of a result."""
    for name, value in result.metrics.items():
        if value is not None:
            yield name, value, 0
    for name in CURVES:
        for step, value in enumerate((result.trace or {}).get(name, [])):
            yield f"batch_{name}", value, step
