"""Run cells on a dask cluster: one that is started on this machine, or the user's.

Workers need only twoshift: models and images are sent to them, each once.
"""

from __future__ import annotations

import logging
import time
import traceback
import uuid
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from twoshift import __version__
from twoshift.adapters import Adapter
from twoshift.bench.cell import Cell
from twoshift.bench.launch.base import (
    Claim,
    Outcome,
    Progress,
    adapter_of,
    attempt,
    pixels_of,
    seldom,
    silent,
    unclaimed,
    weights_of,
)
from twoshift.bench.measure import Images, run_cell
from twoshift.bench.result import Result
from twoshift.bench.workshop import Workshop
from twoshift.data.base import ImageSet
from twoshift.errors import MissingExtra, SettingError
from twoshift.train.checkpoint import SourceModel

if TYPE_CHECKING:
    from distributed import Client, Future

LOOPBACK = "127.0.0.1"
PATIENCE = 60.0  # seconds to wait for an answer of the scheduler and for the first worker
# by default dask makes its workers return freed memory at once, which slows torch down by half
TRIM = "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_"


def launch_dask(
    workshop: Workshop,
    cells: Sequence[Cell],
    *,
    scheduler: str | None = None,
    workers: int = 2,
    retries: int = 2,
    progress: Progress = silent,
    claim: Claim = unclaimed,
) -> Iterator[Outcome]:
    """Run cells on a dask cluster.

    Args:
        workshop: Has models and data, on this machine; missing models are trained here.
        cells: The cells to run.
        scheduler: ``tcp://HOST:PORT`` of a running scheduler; by default a cluster is started on
            loopback.
        workers: Number of processes of that cluster, one thread each.
        retries: How often a cell whose worker died is run again. With your own scheduler, its
            ``distributed.scheduler.allowed-failures`` limits deaths, and this limits lost data.
        progress: Called now and then, with the batches done.
        claim: Asked before a cell is run; where it says no, somebody else runs it.

    Yields:
        Every claimed cell once, as they finish.
    """
    with open_client(scheduler, workers, retries) as client:
        yield from run_on(client, workshop, cells, retries, progress, claim)


@contextmanager
def open_client(scheduler: str | None, workers: int, retries: int) -> Iterator[Client]:
    """A client of a running scheduler, or of a cluster that is started on loopback.

    Args:
        scheduler: ``tcp://HOST:PORT``, or None for a cluster of its own.
        workers: Number of processes of that cluster, one thread each.
        retries: How often work whose process died is done again there.
    """
    distributed = import_distributed()
    import dask

    if scheduler is not None:
        with quiet(), _connect(scheduler) as client:
            yield client
        return
    if workers < 1:
        raise SettingError("workers", must_be="at least 1", got=workers)
    with quiet():
        with dask.config.set({"distributed.scheduler.allowed-failures": retries, TRIM: None}):
            cluster = distributed.LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                host=LOOPBACK,
                dashboard_address=None,
                silence_logs=logging.CRITICAL,
            )
        with cluster, distributed.Client(cluster) as client:
            yield client


def import_distributed() -> Any:
    """Import the optional package; an error says how to install it."""
    try:
        import distributed
    except ImportError as e:
        cure = "pip install 'twoshift[dask]'"
        raise MissingExtra("running on a cluster needs dask", cure=cure) from e
    return distributed


@contextmanager
def quiet() -> Iterator[None]:
    """Silence dask's log: what matters to a user comes as an outcome or an error."""
    logs = [logging.getLogger(name) for name in ("distributed", "distributed.client")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _connect(address: str) -> Client:
    try:
        return import_distributed().Client(address, timeout=PATIENCE)
    except (OSError, ValueError) as e:
        raise _unreachable(address) from e


def _unreachable(address: str) -> SettingError:
    return SettingError(
        "the dask scheduler",
        must_be="running, with workers",
        got=address,
        cure="Start one: dask scheduler, and on every machine: dask worker tcp://HOST:PORT",
    )


def run_on(
    client: Client,
    workshop: Workshop,
    cells: Sequence[Cell],
    retries: int = 2,
    progress: Progress = silent,
    claim: Claim = unclaimed,
    patience: float | None = PATIENCE,
) -> Iterator[Outcome]:
    """Run cells on the cluster of a dask client.

    Args:
        client: A connected client.
        workshop: Has models and data, on this machine.
        cells: The cells to run.
        retries: How often a cell is run again when its data were lost with a worker.
        progress: Called now and then, with the batches done.
        claim: Asked before a cell is run; where it says no, somebody else runs it.
        patience: Seconds to wait for the first worker; None waits as long as it takes.
    """
    ready = list[Cell]()
    for cell in sorted(cells, key=weights_of):  # train everything first: workers would wait for it
        try:
            workshop.models_of(cell)
            ready.append(cell)
        except Exception:
            yield Outcome(cell, None, traceback.format_exc())
    if ready:
        wait_for_workers(client, patience)
        yield from _Run(client, workshop, ready, retries, progress, claim).outcomes()


class _Run:
    """Sends just enough cells to keep the workers busy, so that they hold few images."""

    def __init__(
        self,
        client: Client,
        workshop: Workshop,
        cells: Sequence[Cell],
        retries: int,
        progress: Progress,
        claim: Claim,
    ) -> None:
        self._client, self._workshop = client, workshop
        self._retries, self._progress, self._claim = retries, progress, claim
        self._waiting = deque(enumerate(sorted(cells, key=pixels_of)))
        self._running: dict[str, tuple[Future, int, Cell]] = {}
        self._losses = Counter[int]()
        self._sent: dict[Hashable, Future] = {}
        self._wanted = Counter(name for cell in cells for name in _needs(cell).values())
        self._mail: SimpleQueue[Any] = SimpleQueue()
        self._topic = f"twoshift-{uuid.uuid4().hex}"
        client.subscribe_topic(self._topic, lambda event: self._mail.put(event[1]))

    def outcomes(self) -> Iterator[Outcome]:
        """The outcome of every claimed cell."""
        while self._waiting or self._running:
            while self._waiting and len(self._running) < self._room():
                yield from self._submit(*self._waiting.popleft())
            if self._running:
                yield from self._read(self._mail.get())

    def _room(self) -> int:
        """How many cells to send: one to run and one to wait, for every thread of the cluster."""
        check_client(self._client)  # fails at once, not after all of dask's time-outs
        try:
            return max(2, 2 * sum(self._client.nthreads().values()))
        except OSError as e:
            raise _unreachable(self._client.scheduler.address) from e

    def _submit(self, job: int, cell: Cell) -> Iterator[Outcome]:
        if not self._claim(cell):
            self._done_with(cell)
            return
        try:
            data = {kind: self._send(name, kind, cell) for kind, name in _needs(cell).items()}
        except Exception:
            check_client(self._client)
            yield self._finished(Outcome(cell, None, traceback.format_exc()))
            return
        key = f"{cell.method}-{uuid.uuid4().hex}"
        future = self._client.submit(_measure, cell, key, self._topic, key=key, pure=False, **data)
        self._running[key] = future, job, cell
        future.add_done_callback(self._mail.put)

    def _send(self, name: Hashable, kind: str, cell: Cell) -> Future:
        """Data that a cell needs; sent once, and again if they were lost with their worker."""
        sent = self._sent.get(name)
        if sent is None or sent.status != "finished":
            source, adapter = self._workshop.models_of(cell)
            data: object = adapter if kind == "adapter" else source
            if kind == "images":
                images = self._workshop.images.of(cell, source)
                data = _pixels(images) if isinstance(images, ImageSet) else [*map(_pixels, images)]
            sent = self._sent[name] = self._scatter(data)
        return sent

    def _scatter(self, data: object) -> Future:
        failures = 0
        while True:
            wait_for_workers(self._client, None)
            try:
                return self._client.scatter([data], hash=False)[0]
            except OSError:  # the worker that was to receive it has just died
                check_client(self._client)
                failures += 1
                if failures > self._retries:
                    raise
                time.sleep(0.5)  # until the scheduler has noticed

    def _read(self, message: Any) -> Iterator[Outcome]:
        if isinstance(message, tuple):
            key, done, total = message
            if key in self._running:
                self._progress(self._running[key][2], done, total)
            return
        future, job, cell = self._running.pop(message.key)
        try:
            outcome = _checked(cell, *future.result())
        except CancelledError:  # its data were only on a worker that died
            check_client(self._client)
            self._losses[job] += 1
            if self._losses[job] <= self._retries:
                self._waiting.appendleft((job, cell))
                return
            error = f"the data of this cell were lost {self._losses[job]} times with a worker"
            outcome = Outcome(cell, None, error)
        except Exception:  # dask: its worker died too often, or lacks twoshift
            outcome = Outcome(cell, None, traceback.format_exc())
        yield self._finished(outcome)

    def _finished(self, outcome: Outcome) -> Outcome:
        self._done_with(outcome.cell)
        return outcome

    def _done_with(self, cell: Cell) -> None:
        """Drop data that no other cell needs, here and on the cluster."""
        for name in _needs(cell).values():
            self._wanted[name] -= 1
            if not self._wanted[name]:
                self._sent.pop(name, None)


def _needs(cell: Cell) -> dict[str, Hashable]:
    """Names of the data that a cell needs, by argument of `_measure`."""
    names: dict[str, Hashable] = {"source": weights_of(cell), "images": pixels_of(cell)}
    return names | ({"adapter": adapter_of(cell)} if adapter_of(cell) else {})


def _pixels(images: ImageSet) -> ImageSet:
    """The images in memory, not in a file that a worker may not have."""
    return replace(images, images=np.array(images.images))


def _measure(
    cell: Cell,
    key: str,
    topic: str,
    source: SourceModel,
    images: Images,
    adapter: Adapter | None = None,
) -> tuple[Result | None, str | None]:
    """Measure a cell, on a worker."""
    worker = import_distributed().get_worker()
    progress = seldom(lambda done, total: worker.log_event(topic, (key, done, total)))
    run = partial(run_cell, cell, source, adapter, images=images, progress=progress)
    return attempt(cell, run)[1:]


def _checked(cell: Cell, result: Result | None, error: str | None) -> Outcome:
    if result is not None and result.key != cell.key:
        error = f"the worker has twoshift {result.facts['twoshift']}, whose keys differ"
        return Outcome(cell, None, f"{error}. Install {__version__} there.")
    return Outcome(cell, result, error)


def wait_for_workers(client: Client, patience: float | None = PATIENCE) -> None:
    """Wait for the first worker."""
    try:
        client.wait_for_workers(1, timeout=patience)
    except OSError as e:  # includes time-outs
        raise _unreachable(client.scheduler.address) from e


def check_client(client: Client) -> None:
    """Raise an error if the scheduler is gone."""
    if client.status != "running":
        raise _unreachable(client.scheduler.address)
