"""Run cells in worker processes on this machine; a worker that dies is replaced."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch

from twoshift.bench.cell import Cell
from twoshift.bench.launch.base import (
    Claim,
    Outcome,
    Pixels,
    Progress,
    adapter_of,
    pixels_of,
    run_one,
    seldom,
    silent,
    unclaimed,
    weights_of,
)
from twoshift.bench.workshop import Workshop
from twoshift.errors import SettingError

WORKERS = "TWOSHIFT_WORKERS"
Pile = tuple[str, Pixels]
Job = tuple[Pile, int]


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    job: Job


class _Piles:
    """Cells grouped by model and images, handed out so that a worker can keep both in memory."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._piles: dict[Pile, deque[int]] = {}
        for job, cell in enumerate(cells):
            self._piles.setdefault((weights_of(cell), pixels_of(cell)), deque()).append(job)
        self._adapters = [adapter_of(cell) for cell in cells]

    def take(self, own: Pile | None, others: Sequence[Job]) -> Job | None:
        """The next job: of the same pile if possible, else of a pile that few others work on.

        Within a pile, jobs that need none of the adapters in use come first: while one worker
        trains an adapter, the others would have to wait for it.
        """
        left = [pile for pile, jobs in self._piles.items() if jobs]
        if not left:
            return None
        busy = Counter(pile for pile, _ in others)
        models = Counter(model for (model, _), _ in others)
        best = min(left, key=lambda p: (p != own, models[p[0]], busy[p], -len(self._piles[p])))
        jobs, theirs = self._piles[best], {self._adapters[job] for _, job in others} - {None}
        job = next((job for job in jobs if self._adapters[job] not in theirs), jobs[0])
        jobs.remove(job)
        return best, job

    def put_back(self, pile: Pile, job: int) -> None:
        """Return an unfinished job, which comes next."""
        self._piles[pile].appendleft(job)


def launch_processes(
    workshop: Workshop,
    cells: Sequence[Cell],
    *,
    workers: int | None = None,
    retries: int = 2,
    progress: Progress = silent,
    claim: Claim = unclaimed,
) -> Iterator[Outcome]:
    """Run cells in worker processes, which share the threads torch has here.

    Args:
        workshop: Has models and data; every worker keeps its own in memory.
        cells: The cells to run.
        workers: Number of processes; by default one per core.
        retries: How often a cell whose worker died is run again.
        progress: Called now and then, with the batches done.
        claim: Asked before a cell is run; where it says no, somebody else runs it.

    Yields:
        Every claimed cell once, as they finish.
    """
    if workers is not None and workers < 1:
        raise SettingError("workers", must_be="at least 1", got=workers)
    count = min(workers or os.cpu_count() or 1, len(cells))
    share = {"threads": max(1, torch.get_num_threads() // max(1, count)), "workers": count}
    piles, deaths = _Piles(cells), Counter[int]()
    crew: dict[Connection, _Worker] = {}
    leaving = list[SpawnProcess]()

    def take(own: Pile | None) -> Job | None:
        others = [worker.job for worker in crew.values()]
        while (job := piles.take(own, others)) and not claim(cells[job[1]]):
            pass
        return job

    def send(worker: _Worker) -> None:
        crew[worker.pipe] = worker
        with suppress(OSError):  # it is dead already: the next read will show it
            worker.pipe.send(cells[worker.job[1]])

    def hire(own: Pile | None) -> None:
        if next_job := take(own):
            send(_Worker(*_start(workshop, share), next_job))

    try:
        for _ in range(count):
            hire(None)
        while crew:
            for pipe in wait(list(crew)):
                assert isinstance(pipe, Connection)
                worker = crew.pop(pipe)
                pile, job = worker.job
                try:
                    message = pipe.recv()
                except (EOFError, OSError):  # the worker died, perhaps within a message
                    pipe.close()
                    worker.process.join()
                    deaths[job] += 1
                    if deaths[job] <= retries:
                        piles.put_back(pile, job)
                    hire(pile)
                    if deaths[job] > retries:
                        yield Outcome(cells[job], None, _obituary(worker.process, deaths[job]))
                    continue
                if isinstance(message, Outcome):
                    if next_job := take(pile):  # at once: the caller may take a while
                        worker.job = next_job
                        send(worker)
                    else:
                        pipe.close()  # the worker then ends
                        leaving.append(worker.process)
                    yield message
                else:
                    crew[pipe] = worker
                    progress(cells[job], *message)
    finally:
        for worker in crew.values():
            worker.process.kill()
            worker.pipe.close()
            leaving.append(worker.process)
        for process in leaving:
            process.join()


def _start(workshop: Workshop, share: dict[str, int]) -> tuple[SpawnProcess, Connection]:
    context = get_context("spawn")  # a forked torch may hang
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, workshop), kwargs=share, daemon=True)
    process.start()
    theirs.close()  # so that the death of the worker closes the last copy
    return process, ours


def _work(pipe: Connection, workshop: Workshop, threads: int, workers: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the workers
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    os.environ[WORKERS] = str(workers)  # readers of images divide memory and threads by it
    report = seldom(lambda done, total: pipe.send((done, total)))
    with suppress(EOFError):
        while True:
            cell = pipe.recv()
            pipe.send(run_one(workshop, cell, lambda _, done, total: report(done, total)))


def end_with_parent() -> None:
    """End with the parent: if it is killed, nobody waits for the work."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _obituary(process: SpawnProcess, times: int) -> str:
    code = process.exitcode or 0
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return (
        f"the worker process of this cell died {times} times, the last time by {how}. "
        "If memory is short, use fewer workers."
    )
