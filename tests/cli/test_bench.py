"""``twoshift bench`` on a tiny table: from nothing to numbers, and on after any interruption."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from functools import wraps

import pytest

from twoshift.bench.store import Store
from twoshift.bench.table import load_table, table_names

TABLE = """
title: Digits
paper: none
benchmark: digits
columns: labels
benchmarks:
  digits:
    preset: cifar10-c
    severity: 5
    corruptions: [contrast, gaussian_noise]
    labels: [forward-10, backward-10]
    profiles:
      cpu:
        source_recipe: {recipe: demo, dataset: digits8x8, ratio: 10, epochs: 1}
        adapter_recipe: {recipe: demo, epochs: 1}
        seeds: 1
rows:
  - {name: Source, method: source}
  - {name: TENT, method: tent}
  - {name: TENT+Ours, method: tent, adapter: trained}
"""
NUMBERS = "row,column,value\nTENT,forward-10,80.36\nTENT,backward-10,28.64\nTENT,mean,54.50\n"
CELLS = 12


@pytest.fixture
def table(tmp_path):
    (tmp_path / "digits.yaml").write_text(TABLE)
    (tmp_path / "digits.csv").write_text(NUMBERS)
    return tmp_path / "digits.yaml"


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Where the first bench trains the tiny models and the others find them."""
    return tmp_path_factory.mktemp("bench-models")


@pytest.fixture
def bench(twoshift, table, models, tmp_path):
    places = ["--store", tmp_path / "r.db", "--models", models, "--data", tmp_path / "data"]
    return lambda *options: twoshift("bench", table, *places, *options)


def accuracies(path):
    with Store(path) as store:
        return {r.key: r.metrics["accuracy"] for r in store.results()}


def test_it_measures_shows_and_then_has_nothing_to_do(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = bench()
    assert code == 0
    assert "Digits" in out
    assert "80.36" in out  # the paper's
    assert "worst" in out
    measured = accuracies(tmp_path / "r.db")
    assert len(measured) == CELLS
    code, _, _ = bench("--launch", "processes")  # would be slow if it ran something
    assert code == 0
    assert accuracies(tmp_path / "r.db") == measured


def test_dry_run_needs_nothing(twoshift, table, tmp_path):
    options = ["--store", tmp_path / "no" / "r.db", "--models", tmp_path / "none"]
    code, out, _ = twoshift("bench", table, *options, "--dry-run", "--json")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert len({line["key"] for line in lines}) == CELLS
    assert not (tmp_path / "no").exists()
    code, out, _ = twoshift("bench", "table2-imagenet", "--profile", "paper", "--dry-run")
    assert code == 0  # the data set cannot even be read here
    assert len(out.splitlines()) > 1000


def test_a_dry_run_ends_with_totals_and_an_estimate(bench, models):
    out = bench("--dry-run")[1]
    assert out.count("+ trained adapter") == 4
    totals = out.partition("\n\n")[2].splitlines()
    assert totals[0] == "12 cells"
    assert totals[1].startswith("0 measured: no ")
    assert totals[2] == "12 to measure"
    assert totals[3].startswith("estimate: ")
    assert "12 cells by their multiply-adds" in out
    bench("--only", "corruption=contrast")
    out = bench("--dry-run")[1]
    assert "6 measured already, in " in out
    assert "6 to measure" in out
    assert "6 cells as long as others of their method took" in out
    assert "multiply-adds" not in out
    assert "not estimated" not in out  # all models are there
    assert max(map(len, out.partition("12 cells")[2].splitlines()[2:])) <= 80
    lines = [json.loads(line) for line in bench("--dry-run", "--json")[1].splitlines()]
    assert sum(line["measured"] for line in lines) == 6


def test_a_dry_run_names_what_must_be_trained(twoshift, table, tmp_path):
    places = ["--store", tmp_path / "r.db", "--models", tmp_path / "none"]
    out = twoshift("bench", table, *places, "--dry-run")[1]
    assert "not estimated: the training of 1 source models and 1 adapters" in out
    assert not (tmp_path / "none").exists()


def test_some_of_it_and_how_far_it_is(bench):
    code, out, _ = bench("--only", "method=tent", "--only", "corruption=contrast", "--json")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert len(lines) == 4
    assert all(line["error"] is None and 0 <= line["accuracy"] <= 1 for line in lines)
    facts = json.loads(bench("--status", "--json")[1])
    assert (facts["cells"], facts["done"], facts["missing"]) == (CELLS, 4, CELLS - 4)
    assert "missing 8" in bench("--status")[1]


def test_a_damaged_record_is_measured_again(bench, tmp_path):
    bench("--only", "method=source")
    before = accuracies(tmp_path / "r.db")
    with sqlite3.connect(tmp_path / "r.db") as db:
        key = next(iter(before))
        db.execute("UPDATE results SET content = substr(content, 1, 40) WHERE key = ?", [key])
    facts = json.loads(bench("--status", "--json")[1])
    assert (facts["done"], facts["damaged"]) == (3, 1)
    assert bench("--only", "method=source")[0] == 0
    assert accuracies(tmp_path / "r.db") == before


def test_a_failed_cell_is_named_and_the_rest_goes_on(bench, tmp_path, monkeypatch):
    from twoshift.methods import Tent

    def broken(self, x):
        raise ArithmeticError("the sky fell")

    with monkeypatch.context() as patch:
        patch.setattr(Tent, "adapt", broken)
        code, _, err = bench()
    assert code == 1
    assert "the sky fell" in err
    assert "Traceback" in err
    assert len(accuracies(tmp_path / "r.db")) == 4
    assert "failed 8" in bench("--status")[1]
    assert bench()[0] == 0
    assert "failed 0" in bench("--status")[1]


def test_other_weights_are_not_mixed_in(bench, tmp_path, twoshift, table):
    """Training again elsewhere may give other weights: their numbers belong in another store."""
    bench("--only", "method=source", "--only", "corruption=contrast")
    with sqlite3.connect(tmp_path / "r.db") as db:
        db.execute("UPDATE weights SET weights = 'others'")
    code, _, err = bench("--only", "method=tent")
    assert code == 1
    assert "MismatchError" in err


def test_bad_images_are_skipped_on_demand_and_counted(twoshift, pictures, tmp_path):
    own = TABLE.replace("dataset: digits8x8, ratio: 10", f"dataset: 'folder:{pictures}', ratio: 1")
    small = "settings: {width: 16}, decoding: {size: 12, frame: 16}, batch_size: 4"
    own = own.replace("source_recipe: {", f"source_recipe: {{{small}, ")
    (tmp_path / "own.yaml").write_text(own)
    places = ["--store", tmp_path / "r.db", "--models", tmp_path / "m", "--data", tmp_path / "d"]
    some = ["--only", "labels=backward-10", "--only", "corruption=contrast"]
    code, _, err = twoshift("bench", tmp_path / "own.yaml", *places, *some)
    assert (code, "11.png" in err) == (1, True)
    code, _, err = twoshift("bench", tmp_path / "own.yaml", *places, *some, "--skip-bad")
    assert code == 0, err
    with Store(tmp_path / "r.db") as store:
        found = [r.facts["skipped_images"] for r in store.results()]
    assert found == [1, 1, 1]


def test_the_list_of_tables(twoshift):
    code, out, _ = twoshift("bench")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == table_names()


def test_counts_need_no_store(twoshift, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    code, out, _ = twoshift("bench", "table8-cost")
    assert code == 0
    assert "557.93" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--profile", "gpu"], "has no profile 'gpu'"),
        (["--only", "method"], "must be NAME=VALUE"),
        (["--only", "method=tend"], "Did you mean 'tent'"),
        (["--launch", "locale"], "Did you mean 'local'"),
        (["--launch", "locale", "--dry-run"], "Did you mean 'local'"),
        (["--track", "mlfow"], "Did you mean 'mlflow'"),
        (["--only", "metod=tent"], "Did you mean 'method'"),
        (["--only", "corruption=contrsat"], "Did you mean 'contrast'"),
        (["--launch", "local", "--scheduler", "tcp://127.0.0.1:1"], "no option 'scheduler'"),
        (["--queue", "short"], "launcher 'local' has no option 'queue'. It is an option of slurm."),
        (["--launch", "dask", "--walltime", "01:00:00"], "'dask' has no option 'walltime'"),
    ],
)
def test_a_wrong_option_is_a_sentence(bench, tmp_path, options, says):
    before = set(tmp_path.rglob("*"))
    code, _, err = bench(*options)
    assert code == 2
    assert says in err
    assert set(tmp_path.rglob("*")) == before  # it leaves nothing behind


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("dataset: digits8x8", "dataset: digit8x8", "Did you mean 'digits8x8'"),
        ("epochs: 1}", "epochs: 1, architecture: resnet18_cifr}", "Did you mean 'resnet18_cifar'"),
        ("method: tent}", "method: tnet}", "Did you mean 'tent'"),
        ("preset: cifar10-c", "preset: cifar10", "Did you mean 'cifar10-c'"),
        ("[contrast,", "[contrsat,", "Did you mean 'contrast'"),
        ("[forward-10,", "[foward-10,", "Did you mean 'forward-50'"),
    ],
)
def test_a_mistake_in_a_table_is_told_before_anything_is_made(
    bench, table, tmp_path, right, wrong, says
):
    table.write_text(TABLE.replace(right, wrong, 1))
    before = set(tmp_path.rglob("*"))
    code, _, err = bench()
    assert code == 2
    assert says in err
    assert set(tmp_path.rglob("*")) == before


def test_a_folder_is_not_called_a_store_that_cannot_be_written(twoshift, tmp_path):
    for command in (["bench", "demo", "--status", "--store"], ["export", "--to", "csv", "--out=x"]):
        code, _, err = twoshift(*command, tmp_path)
        assert code == 2
        assert "is a folder, not a results store" in err


def test_slurm_jobs_get_their_options_by_name(bench, monkeypatch):
    from twoshift.bench.launch import launchers
    from twoshift.bench.launch.slurm import launch_slurm

    wanted = {"workers": 3, "cores": 4, "queue": "short", "account": "lab", "memory": "8GB"}
    wanted |= {"walltime": "02:30:00", "interface": "ib0"}
    seen = {}

    @wraps(launch_slurm)
    def launch(workshop, cells, **options):
        seen.update(options)
        return iter(())

    monkeypatch.setitem(launchers, "slurm", launch)
    given = [word for name, value in wanted.items() for word in (f"--{name}", value)]
    assert bench("--launch", "slurm", *given)[0] == 0
    assert seen.pop("progress")
    assert seen.pop("claim")
    assert seen == wanted


def test_an_unknown_table(twoshift):
    code, _, err = twoshift("bench", "table1-cifar11")
    assert code == 2
    assert "Did you mean 'table1-cifar10'" in err


@pytest.mark.slow
def test_killed_twenty_times_it_loses_and_doubles_nothing(table, models, tmp_path, bench):
    places = ["--store", tmp_path / "k.db", "--models", models, "--data", tmp_path / "data"]
    run = "import sys; from twoshift.cli import main; sys.argv[0] = 'twoshift'; main()"
    command = [sys.executable, "-c", run, "bench", table, *places, "--seeds", "4", "--json"]
    rng, seen = random.Random(0), 0
    for _ in range(20):
        process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            process.wait(timeout=rng.uniform(1, 8))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if (tmp_path / "k.db").exists():
            with Store(tmp_path / "k.db") as store:
                assert len(store) >= seen  # what was there is there
                seen = len(store)
                assert not store.damaged()
    assert subprocess.run(list(map(str, command)), check=False).returncode == 0
    wanted = {cell.key for cell in load_table(table).cells("cpu", seeds=4)}
    with Store(tmp_path / "k.db") as store:
        keys = [r.key for r in store.results()]
    assert len(keys) == len(set(keys)) == len(wanted) == 4 * CELLS
    assert set(keys) == wanted
