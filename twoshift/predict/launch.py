"""Who runs the parts of an offline run: this process, others on this machine, or a dask cluster.

All of them give the same parts. One whose worker dies is run again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from twoshift.bench.launch.dask import (
    check_client,
    import_distributed,
    open_client,
    wait_for_workers,
)
from twoshift.bench.launch.processes import WORKERS, end_with_parent
from twoshift.errors import ModelError, SettingError, TwoshiftError
from twoshift.predict.offline import Launch
from twoshift.predict.shards import Found, Opening, Task, do_elsewhere
from twoshift.registry import check_choice

LOCAL, PROCESSES, DASK = "local", "processes", "dask"
LAUNCHERS = (LOCAL, PROCESSES, DASK)
RETRIES = 2  # times that a part is run again after the death of its worker
SECONDS = 2.0  # between two looks at whether the scheduler is still there


def launcher(
    name: str, opening: Opening, workers: int | None = None, scheduler: str | None = None
) -> Launch | None:
    """What runs parts; None for this process.

    Args:
        name: ``"local"``, ``"processes"`` or ``"dask"``.
        opening: How workers open model and images.
        workers: Number of processes; by default one per core.
        scheduler: ``tcp://HOST:PORT`` of a running dask scheduler.
    """
    check_choice("predict", LAUNCHERS, launch=name)
    if scheduler is not None and name != DASK:
        raise SettingError("--scheduler", must_be="used with --launch dask")
    if workers is not None and (name == LOCAL or scheduler is not None):
        cure = "Your own scheduler has its own workers." if scheduler else "--launch processes"
        raise SettingError("--workers", must_be="used with processes of this run", cure=cure)
    count = workers or os.cpu_count() or 1
    if count < 1:
        raise SettingError("--workers", must_be="at least 1", got=workers)
    if name == LOCAL:
        return None
    if name == DASK:
        import_distributed()  # a missing package is noticed before the work
        return partial(_on_dask, opening, count, scheduler)
    return partial(_in_processes, opening, count)


def _in_processes(opening: Opening, workers: int, tasks: Sequence[Task]) -> Iterator[Found]:
    """Run parts in processes of this machine; a pool with a dead process is replaced."""
    waiting, deaths = deque(tasks), 0
    while waiting:
        running: dict[Future[Found], Task] = {}
        count = min(workers, len(waiting))
        threads = max(1, torch.get_num_threads() // count)
        pool = ProcessPoolExecutor(count, get_context("spawn"), _prepare, (threads, count))
        try:
            while waiting or running:
                while waiting and len(running) < 2 * count:  # few, since each holds its statistics
                    task = waiting.popleft()
                    running[pool.submit(do_elsewhere, opening, task)] = task
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    found = future.result()
                    running.pop(future)
                    deaths = 0
                    yield found
        except BrokenProcessPool as e:
            deaths += 1
            if deaths > RETRIES:
                cure = "If memory is short, use fewer workers; finished parts are kept."
                raise ModelError(f"worker processes died {deaths} times in a row", cure=cure) from e
            waiting.extendleft(sorted(running.values(), key=lambda task: -task.number))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _prepare(threads: int, workers: int) -> None:
    """Begin a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the workers
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    os.environ[WORKERS] = str(workers)  # readers of images divide memory and threads by it


def _on_dask(
    opening: Opening, workers: int, scheduler: str | None, tasks: Sequence[Task]
) -> Iterator[Found]:
    """Run parts on a dask cluster."""
    if not tasks:
        return
    distributed = import_distributed()
    with open_client(scheduler, workers, RETRIES) as client:
        wait_for_workers(client)
        waiting, running = deque(tasks), set[Any]()
        while waiting or running:
            check_client(client)  # at once, not after all of dask's time-outs
            room = max(2, 2 * sum(client.nthreads().values()))
            while waiting and len(running) < room:
                task = waiting.popleft()
                running.add(client.submit(do_elsewhere, opening, task, pure=False))
            try:
                done, running = distributed.wait(running, SECONDS, return_when="FIRST_COMPLETED")
            except (TimeoutError, distributed.TimeoutError):
                continue
            for future in done:
                yield _result(client, future)


def _result(client: Any, future: Any) -> Found:
    try:
        found: Found = future.result()
    except TwoshiftError:
        raise
    except Exception as e:  # dask: its worker died too often, or lacks twoshift
        check_client(client)
        cure = "Finished parts are kept: the same command continues."
        raise ModelError(f"a part failed on the cluster: {e}", cure=cure) from e
    return found
