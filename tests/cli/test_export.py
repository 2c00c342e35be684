from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import pytest

from tests.bench.stored import make_result, without_trace
from twoshift.bench.store import Store


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "results.db"
    with Store(path) as opened:
        for seed in range(3):
            opened.put(make_result(seed))
    return path


@pytest.mark.parametrize("trace", [False, True])
def test_json_lines(twoshift, store, tmp_path, trace):
    out = tmp_path / "results.jsonl"
    code, said, err = twoshift(
        "export", store, "--to", "json", "--out", out, *["--trace"][: int(trace)]
    )
    assert (code, said, err) == (0, f"3 results in {out}\n", "")
    found = {r["cell"]["seed"]: r for r in map(json.loads, out.read_text().splitlines())}
    expected = make_result(2) if trace else without_trace(make_result(2))
    assert found[2] == expected.to_json()


@pytest.mark.parametrize("name", [[], ["results"]])
def test_csv(twoshift, store, tmp_path, name):
    out = tmp_path / "results.csv"
    assert twoshift("export", *name, "--to", "csv", store, "--out", out)[0] == 0
    header, *lines = out.read_text().splitlines()
    assert header.startswith("key,adapter,batch_size,corruption,")
    assert len(lines) == 3


def test_parquet(twoshift, store, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "results.parquet"
    assert twoshift("export", store, "--to", "parquet", "--out", out)[0] == 0
    assert parquet.read_table(out)["seed"].to_pylist().count(2) == 1


def test_damaged_records_are_left_out_and_told(twoshift, store, tmp_path):
    with closing(sqlite3.connect(store)) as db, db:
        db.execute("UPDATE results SET content = '{}' WHERE key = ?", [make_result(1).key])
    out = tmp_path / "results.jsonl"
    code, said, err = twoshift("export", store, "--to", "json", "--out", out)
    assert (code, said) == (0, f"2 results in {out}\n")
    assert "left out: 1 damaged" in err


def test_mistakes(twoshift, store, tmp_path):
    out = tmp_path / "out"
    for arguments, says in [
        ((tmp_path / "none.db", "--to", "csv"), "no results store"),
        ((store, "--to", "csv", "--trace"), "--to json"),
        ((store, "--to", "xml"), "xml"),
    ]:
        code, _, err = twoshift("export", *arguments, "--out", out)
        assert code == 2
        assert says in err
    assert not out.exists()


def test_what_was_exported_comes_back(twoshift, store, tmp_path):
    lines, other = tmp_path / "results.jsonl", tmp_path / "other.db"
    assert twoshift("export", store, "--to", "json", "--out", lines, "--trace")[0] == 0
    assert twoshift("import", lines, "--store", other)[1] == f"3 new results in {other}\n"
    assert twoshift("import", lines, "--store", other)[1] == f"0 new results in {other}\n"
    with Store(store) as a, Store(other) as b:
        assert list(a.results(trace=True)) == list(b.results(trace=True))
    lines.write_text(lines.read_text().replace('"seed":1', '"seed":7'))
    code, _, err = twoshift("import", lines, "--store", tmp_path / "third.db")
    assert code == 2
    assert "the key of a result" in err
