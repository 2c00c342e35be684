import json
import time

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import runner_speed
from benchmarks.runner_speed import Seconds
from benchmarks.timing import Check
from twoshift.bench.launch import Outcome
from twoshift.bench.run import missing
from twoshift.bench.store import Store
from twoshift.bench.table import load_table
from twoshift.bench.workshop import Workshop


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The same measurements on cells that cost nothing, and few of them."""
    threads = torch.get_num_threads()
    few = {"IMAGES": runner_speed.TINY, "ROUNDS": 2, "FINISHED": 100, "REPORTED": 50}
    for name, value in few.items():
        monkeypatch.setattr(runner_speed, name, value)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speed")
    return Workshop(folder / "models", folder / "data")


def test_the_runner_is_compared_with_the_same_work(workshop, tmp_path):
    (check,) = runner_speed.overhead(workshop, tmp_path)
    assert 0.5 < check.value < 10  # these cells are too small to say more
    assert check.high == 1.03


def test_large_stores_are_whole_and_the_commands_are_run(workshop, tmp_path):
    checks = {check.name: check for check in runner_speed.large(workshop, tmp_path)}
    table = load_table(runner_speed.TABLE)
    finished = len(table.cells("cpu", 1))
    assert checks[f"resume of {finished:,} finished cells"].value > 0
    assert checks["page of 50 cells, size"].value == (tmp_path / "page.html").stat().st_size / 1e6
    with Store(tmp_path / "finished.db") as store:
        assert missing(table.cells("cpu", 1), store) == []
    with Store(tmp_path / "reported.db") as store:
        assert len(store) == 50


def test_cpu_time_and_the_clock_are_told_apart():
    def outcomes(error=None):
        time.sleep(0.3)
        yield Outcome(runner_speed.make_cells(1)[0], None, error)

    cost = runner_speed.time_all(outcomes())
    assert cost.elapsed >= 0.29
    assert cost.cpu < 0.2
    with pytest.raises(AssertionError, match="it hurts"):
        runner_speed.time_all(outcomes("it hurts"))


@pytest.mark.parametrize(("each", "ok"), [(0.6, True), (1.0, False)], ids=["beside", "in turn"])
@pytest.mark.parametrize("quiet", [True, False])
def test_workers_that_wait_for_each_other_are_found(workshop, monkeypatch, quiet, each, ok):
    """Local cells take 1 s; those of two workers cost as much, and end ``each`` second."""
    start, more = Seconds(5, 5), runner_speed.MANY - runner_speed.FEW
    costs = [start, Seconds(5 + more, 5 + more), start, Seconds(5 + more, 5 + each * more)]
    monkeypatch.setattr(runner_speed, "time_all", lambda outcomes: costs.pop(0))
    cpu, *elapsed = runner_speed.parallel(workshop, quiet)
    assert (cpu.value, cpu.low, cpu.high) == (pytest.approx(1), 0, None)  # information only
    assert [(c.value, c.ok) for c in elapsed] == ([(pytest.approx(1 / each), ok)] * quiet)


@pytest.mark.slow
def test_dask_costs_something(workshop):
    pytest.importorskip("distributed")
    (check,) = runner_speed.dask(workshop)
    assert 0 <= check.value < 1000


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("load", [0.1, 3.0])
def test_the_command(monkeypatch, tmp_path, broken, installed, load):
    monkeypatch.setattr(runner_speed.os, "getloadavg", lambda: (load, load, load))
    limited = Check("a cost", 2.0, high=1.0 if broken else 3.0, unit="s")
    for name in ("overhead", "parallel", "dask"):
        check = Check(name, 1.0)
        monkeypatch.setattr(runner_speed, name, lambda *_, check=check, **__: [check])
    monkeypatch.setattr(runner_speed, "large", lambda *_: [limited])
    monkeypatch.setattr(runner_speed, "find_spec", lambda name: installed or None)
    app = runner_speed.typer.Typer()
    app.command()(runner_speed.main)
    out = tmp_path / "deep" / "speed.json"
    result = CliRunner().invoke(app, ["--out", str(out)])
    assert result.exit_code == (1 if broken else 0), result.output
    assert ("FAIL" in result.output) == broken
    assert ("dask: not measured" in result.output) == (not installed)
    record = json.loads(out.read_text())
    assert ("dask" in [check["name"] for check in record["checks"]]) == installed
    assert record["not_measured"] == ([runner_speed.ELAPSED] if load > 1 else [])
    assert ("elapsed: not measured because the machine is busy (load 3.0)" in result.output) == (
        load > 1
    )
