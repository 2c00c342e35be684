"""Run cells as jobs of a SLURM cluster, through dask-jobqueue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from twoshift.bench.cell import Cell
from twoshift.bench.launch.base import Claim, Outcome, Progress, silent, unclaimed
from twoshift.bench.launch.dask import import_distributed, quiet, run_on
from twoshift.bench.workshop import Workshop
from twoshift.errors import MissingExtra, SettingError


def launch_slurm(
    workshop: Workshop,
    cells: Sequence[Cell],
    *,
    workers: int = 2,
    queue: str | None = None,
    account: str | None = None,
    cores: int = 1,
    memory: str = "4GB",
    walltime: str | None = None,
    interface: str | None = None,
    retries: int = 2,
    progress: Progress = silent,
    claim: Claim = unclaimed,
) -> Iterator[Outcome]:
    """Run cells as SLURM jobs; this process keeps running, sends cells and collects results.

    Options that are not given come from the user's ``jobqueue.yaml``, which dask-jobqueue reads.

    Args:
        workshop: Has models and data, on this machine; missing models are trained here.
        cells: The cells to run.
        workers: Number of jobs.
        queue: Partition.
        account: Account to charge.
        cores: Cores per job; every core runs a cell.
        memory: Memory per job.
        walltime: Time per job, ``HH:MM:SS``; a cell that is cut off is run again elsewhere.
        interface: Network interface over which the jobs reach this machine, for example ``ib0``;
            by default that of the host's address. It must be a trusted network: dask executes
            what it is sent.
        retries: How often a cell is run again when its data were lost with a job.
        progress: Called now and then, with the batches done.
        claim: Asked before a cell is run; where it says no, somebody else runs it.

    Yields:
        Every claimed cell once, as they finish.
    """
    distributed = import_distributed()
    with (
        quiet(),
        slurm_cluster(queue, account, cores, memory, walltime, interface) as cluster,
        distributed.Client(cluster) as client,
    ):
        cluster.scale(jobs=workers)
        yield from run_on(client, workshop, cells, retries, progress, claim, patience=None)


def slurm_cluster(
    queue: str | None,
    account: str | None,
    cores: int,
    memory: str,
    walltime: str | None,
    interface: str | None,
) -> Any:
    """A cluster that has no jobs yet; its ``job_script()`` shows what will be submitted."""
    try:
        from dask.utils import parse_bytes
        from dask_jobqueue import SLURMCluster
    except ImportError as e:
        cure = "pip install 'twoshift[dask]'"
        raise MissingExtra("SLURM jobs need dask-jobqueue", cure=cure) from e
    # without a host or an interface, the scheduler would listen on every network
    host = {} if interface else {"host": import_distributed().utils.get_ip()}
    try:
        parse_bytes(memory)  # before a cluster is half started
        return SLURMCluster(
            queue=queue,
            account=account,
            cores=cores,
            processes=cores,
            memory=memory,
            walltime=walltime,
            interface=interface,
            scheduler_options={"dashboard": False, **host},
        )
    except (ValueError, RuntimeError) as e:
        raise SettingError(f"SLURM job settings: {e}") from e
