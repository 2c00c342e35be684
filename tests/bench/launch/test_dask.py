"""On real dask clusters, all on loopback."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.bench.launch.toys import make_cells, make_model, numbers
from twoshift.bench.cell import Cell
from twoshift.bench.launch import Outcome
from twoshift.bench.launch import dask as launch_module
from twoshift.bench.launch.dask import launch_dask
from twoshift.bench.launch.slurm import launch_slurm, slurm_cluster
from twoshift.errors import SettingError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # dask's are not ours
distributed = pytest.importorskip("distributed")

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "OMP_NUM_THREADS": "1",
}


def start(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "dask", *map(str, arguments)]
    return subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)


class Cluster:
    """A scheduler and worker processes that nobody starts again."""

    def __init__(self, folder, workers: int) -> None:
        file = folder / "scheduler.json"
        place = ("--host", "127.0.0.1", "--scheduler-file", file)
        self.scheduler = start("scheduler", *place, "--port", 0, "--no-dashboard")
        self.workers = [
            start("worker", *place, "--no-nanny", "--nthreads", 1, "--no-dashboard")
            for _ in range(workers)
        ]
        with distributed.Client(scheduler_file=str(file), timeout=120) as client:
            client.wait_for_workers(workers, timeout=120)
            self.address = client.scheduler.address

    def close(self) -> None:
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, workers=2)
    yield made
    made.close()


def test_a_worker_is_killed_and_every_cell_is_there_once(workshop, local, cluster):
    outcomes, seen = [], []
    told = lambda *batches: seen.append(batches)  # noqa: E731
    launched = launch_dask(workshop, make_cells(), scheduler=cluster.address, progress=told)
    for outcome in launched:
        outcomes.append(outcome)
        if len(outcomes) == 3:
            cluster.workers[0].kill()
    assert cluster.workers[0].poll() is not None
    assert numbers(outcomes) == numbers(local)
    assert {cell.key for cell, done, total in seen if done == total} <= numbers(local).keys()
    assert seen


def test_cells_of_others_are_left_out(workshop, local, cluster):
    wanted = {cell.key for cell in make_cells()[::3]}
    launched = launch_dask(
        workshop,
        make_cells(),
        scheduler=cluster.address,
        claim=lambda cell: cell.key in wanted,
    )
    found = numbers(list(launched))
    assert found.keys() == wanted
    assert found.items() <= numbers(local).items()


def test_what_was_only_on_a_dead_worker_is_sent_again(workshop, local):
    """One worker has everything: with it go models, images and results that nobody fetched."""
    outcomes = []
    for outcome in launch_dask(workshop, make_cells(), workers=1):
        outcomes.append(outcome)
        if len(outcomes) in (2, 6):
            (worker,) = multiprocessing.active_children()
            worker.kill()
    assert numbers(outcomes) == numbers(local)
    assert not multiprocessing.active_children()


def test_errors_are_told_and_the_rest_goes_on(workshop, local, monkeypatch):
    sent = []
    scatter = distributed.Client.scatter

    def counted(self, things, **options):
        sent.extend(type(thing).__name__ for thing in things)
        return scatter(self, things, **options)

    monkeypatch.setattr(distributed.Client, "scatter", counted)
    good = make_cells()
    bare = Cell("source")
    unknown = Cell("source", labels="uniforn", model=make_model())
    nowhere = Cell("source", target="nosuchset", model=make_model())
    joined = Cell("source", corruption="contrast+clean", order="sorted", model=make_model())
    cells = [unknown, *good, bare, nowhere, joined]
    outcomes = {o.cell.key: o for o in launch_dask(workshop, cells, workers=2)}
    assert len(outcomes) == len(cells)
    assert "Did you mean 'uniform'" in outcomes[unknown.key].error
    assert "nosuchset" in outcomes[nowhere.key].error
    assert "must be given by recipe" in outcomes[bare.key].error
    assert numbers([outcomes[cell.key] for cell in good]) == numbers(local)
    here = Outcome(joined, workshop.run(joined), None)
    assert numbers([outcomes[joined.key]]) == numbers([here])
    each_once = ["ImageSet", "ImageSet", "LabelShiftAdapter", "SourceModel", "list"]
    assert sorted(sent) == each_once


def test_a_scheduler_that_goes_ends_the_run(workshop, cluster):
    launched = launch_dask(workshop, make_cells(), scheduler=cluster.address)
    next(launched)
    cluster.scheduler.kill()
    with pytest.raises(SettingError, match=r"scheduler, must be running.*Start one: dask"):
        list(launched)


def test_a_scheduler_that_is_not_there(workshop, monkeypatch):
    monkeypatch.setattr(launch_module, "PATIENCE", 1.0)
    with pytest.raises(SettingError, match=r"got tcp://127\.0\.0\.1:1"):
        next(launch_dask(workshop, make_cells(), scheduler="tcp://127.0.0.1:1"))


def test_a_job_script_asks_for_what_is_wanted():
    pytest.importorskip("dask_jobqueue")
    with slurm_cluster("short", "lab", 4, "8GB", "02:30:00", "lo") as cluster:
        script = cluster.job_script()
        assert cluster.scheduler_address.startswith("tcp://127.0.0.1:")
    for line in ("-p short", "-A lab", "--cpus-per-task=4", "--mem=8G", "-t 02:30:00"):
        assert f"#SBATCH {line}" in script
    assert "--nworkers 4" in script
    with pytest.raises(SettingError, match="SLURM job settings"):
        slurm_cluster(None, None, 1, "much", None, "lo")


# a SLURM of one machine: jobs are processes
SBATCH = f"""#!{sys.executable}
import subprocess, sys
job = subprocess.Popen(
    ["bash", sys.argv[-1]],
    start_new_session=True,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)
open(__file__ + ".jobs", "a").write(open(sys.argv[-1]).read())
print("Submitted batch job", job.pid)
"""
SCANCEL = f"""#!{sys.executable}
import os, signal, sys
os.killpg(int(sys.argv[1]), signal.SIGKILL)
"""


def test_slurm_jobs_run_the_cells(workshop, local, tmp_path, monkeypatch):
    pytest.importorskip("dask_jobqueue")
    for name, text in (("sbatch", SBATCH), ("scancel", SCANCEL)):
        script = tmp_path / name
        script.write_text(text)
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    options = {"workers": 1, "cores": 1, "memory": "2GB", "walltime": "00:10:00"}
    outcomes = list(launch_slurm(workshop, make_cells(), interface="lo", **options))
    assert numbers(outcomes) == numbers(local)
    assert "#SBATCH -t 00:10:00" in (tmp_path / "sbatch.jobs").read_text()
