from __future__ import annotations

import csv
import json
import sys

import pytest

from tests.bench.stored import make_result
from twoshift.bench.export import export_csv, export_parquet, flat
from twoshift.bench.store import Store
from twoshift.errors import MissingExtra


@pytest.fixture
def store(tmp_path):
    """Two results; the second has a metric that the first has not."""
    with Store(tmp_path / "results.db") as opened:
        opened.put(make_result(0, adapter="trained"))
        second = make_result(1, accuracy=0.25)
        second.metrics["ece"] = 0.125
        opened.put(second)
        yield opened


def test_a_flat_row_has_cell_metrics_source_and_facts():
    row = flat(make_result(7, adapter="trained"))
    assert (row["method"], row["adapter"], row["seed"]) == ("tent", "trained", 7)
    assert (row["accuracy"], row["tail_recall"]) == (0.5, None)
    assert (row["source_norm"], row["source_seed"], row["facts_seconds"]) == ("bn", 3, 2.0)
    assert row["adapter_weights"] == "b" * 64
    assert json.loads(row["settings"]) == {"lr": 1e-3}
    assert json.loads(row["model"])["seed"] == 3
    assert not any(isinstance(value, dict | list) for value in row.values())


def test_csv(store, tmp_path):
    path = tmp_path / "new" / "results.csv"
    assert export_csv(store, path) == 2
    with path.open(newline="") as file:
        rows = {row["seed"]: row for row in csv.DictReader(file)}
    assert rows["0"]["key"] == make_result(0, adapter="trained").key
    assert (rows["0"]["ece"], rows["1"]["ece"]) == ("", "0.125")
    assert float(rows["0"]["nll"]) == 1 / 3
    assert json.loads(rows["1"]["settings"]) == {"lr": 1e-3}


def test_parquet(store, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "results.parquet"
    assert export_parquet(store, path) == 2
    rows = {row["seed"]: row for row in parquet.read_table(path).to_pylist()}
    assert rows[0]["ece"] is None
    assert (rows[1]["ece"], rows[1]["accuracy"], rows[1]["method"]) == (0.125, 0.25, "tent")


def test_an_empty_store(tmp_path):
    with Store(tmp_path / "results.db") as store:
        assert export_csv(store, tmp_path / "results.csv") == 0
        assert (tmp_path / "results.csv").read_text() == "key\n"
        parquet = pytest.importorskip("pyarrow.parquet")
        assert export_parquet(store, tmp_path / "results.parquet") == 0
        assert parquet.read_table(tmp_path / "results.parquet").num_rows == 0


def test_without_pyarrow(store, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pip install 'twoshift\[parquet\]'"):
        export_parquet(store, tmp_path / "results.parquet")
    assert not (tmp_path / "results.parquet").exists()
