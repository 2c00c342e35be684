"""A mistyped choice of any command is answered with the nearest right one."""

from __future__ import annotations

import pytest

TYPOS = [
    ("benhc", "bench"),
    ("data gett", "get"),
    ("data get cifr10", "cifar10"),
    ("data get cifar10 --from nmp", "npm"),
    ("data check cifr10", "cifar10"),
    ("data check pacs:scetch", "sketch"),
    ("data check imagenet_c:fogg-3", "fog"),
    ("data check digits8x8 --split tset", "test"),
    ("data rsut pac:photo --target pacs:sketch --out lists", "pacs"),
    ("data rsut pacs:photo --target pacs:scetch --out lists", "sketch"),
    ("data rsut pacs:photo --target pacs:sketch --out lists --profile exponentiel", "exponential"),
    ("data rsut pacs:photo --target pacs:sketch --out lists --order sise", "size"),
    ("train surce", "source"),
    ("train source --recipe cifr-cpu --out new", "cifar-cpu"),
    ("train adapter --recipe cifr-cpu --source none --out new", "cifar-cpu"),
    ("recipe shw", "show"),
    ("recipe show cifr", "cifar"),
    ("recipe show cifar10-c --profile papr", "paper"),
    ("recipe show cifar10-c --stage sorce", "source"),
    ("bench tabel1-cifar10", "table1-cifar10"),
    ("bench demo --profile cpuu", "cpu"),
    ("bench demo --launch procesess", "processes"),
    ("bench demo --track tensorbord", "tensorboard"),
    ("figure tau-boundry", "tau-boundary"),
    ("export results.db --to cvs --out x.csv", "csv"),
    ("export results results.db --to cvs --out x.csv", "csv"),
    ("export onxn --state state -o m.onnx", "onnx"),
]


@pytest.mark.parametrize(("typed", "meant"), TYPOS, ids=[typed for typed, _ in TYPOS])
def test_the_nearest_is_named_and_nothing_is_left_behind(
    twoshift, monkeypatch, tmp_path, typed, meant
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TWOSHIFT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = twoshift(*typed.split())
    assert (code, out) == (2, "")
    assert f"Did you mean {meant!r}?" in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_mistyped_option(twoshift):
    code, _, err = twoshift("run", "--source", "none", "--mehtod", "tent")
    assert code == 2
    assert "--method" in err


def test_a_mistyped_table_of_a_report(twoshift, tmp_path):
    from twoshift.bench.store import Store

    Store(tmp_path / "r.db").close()
    where = (tmp_path / "r.db", "-o", tmp_path / "page.html")
    code, _, err = twoshift("report", *where, "--table", "tabel1-cifar10")
    assert code == 2
    assert "Did you mean 'table1-cifar10'?" in err


def test_importing_what_is_not_there_creates_no_store(twoshift, tmp_path):
    code, _, err = twoshift("import", tmp_path / "no.jsonl", "--store", tmp_path / "new.db")
    assert code == 2
    assert "cannot read" in err
    assert list(tmp_path.iterdir()) == []
