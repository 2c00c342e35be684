"""``twoshift demo`` on its published results: they are not measured again."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.documents import ROOT
from twoshift.bench import Cell, Result
from twoshift.bench.table import load_table
from twoshift.bench.workshop import Workshop
from twoshift.cli import demo
from twoshift.priors import named

RESULTS = ROOT / "results" / "demo.jsonl"
COUNTS = list(range(10, 0, -1))


def stream(cell: Cell, norm: str) -> tuple:
    return (
        cell.method,
        norm,
        cell.adapter,
        cell.estimator,
        cell.corruption,
        cell.labels,
        cell.seed,
    )


def published() -> list[Result]:
    """Traces are not published: an estimate that comes nearer to the truth, but not all the way."""
    records = [Result.from_json(json.loads(line)) for line in RESULTS.read_text().splitlines()]
    by_stream = {stream(record.cell, record.source.norm): record for record in records}
    results = []
    for cell in load_table("demo").cells("cpu"):
        record = by_stream.pop(stream(cell, cell.model.source["settings"]["norm"]))
        truth = named(cell.labels, 10)
        estimates = [0.1 + (truth - 0.1) * min(step / 20, 0.8) for step in range(30)]
        trace = {
            "true_prior": truth.tolist(),
            "prior": [e.tolist() for e in estimates],
            "s": [float(np.linspace(1, -1, 10) @ e) for e in estimates],
        }
        facts = (record.source, record.adapter, record.metrics, record.facts)
        results.append(Result(cell.key, cell, *facts, trace))
    assert not by_stream
    return results


def test_table_plots_and_results_are_those_of_the_results(twoshift, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    results = published()

    def put_all(cells, store, start):
        assert [cell.key for cell in cells] == [result.key for result in results]
        for result in results:
            store.put(result)
        return False

    source = SimpleNamespace(card=SimpleNamespace(class_counts=COUNTS))
    monkeypatch.setattr(demo, "measure_missing", put_all)
    monkeypatch.setattr(Workshop, "source", lambda self, model: source)
    code, out, _ = twoshift("demo", "--out", tmp_path / "demo")
    assert code == 0
    assert "IABN + adapter, oracle prior" in out
    assert "TENT against Source: F50:" in out
    files = {path.name: path.read_bytes() for path in (tmp_path / "demo").iterdir()}
    lines = [json.loads(line) for line in files.pop("results.jsonl").splitlines()]
    assert [line["key"] for line in lines] == sorted(result.key for result in results)
    assert files.pop("table.md") == RESULTS.with_name("demo.md").read_bytes()
    assert files.pop("results.db")
    assert all(content.startswith(b"\x89PNG") for content in files.values())
    assert set(files) == {"accuracy_against_shift.png", "label_estimate.png"}


def test_cells_that_fail_end_the_demo(twoshift, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "measure_missing", lambda cells, store, start: True)
    code, out, _ = twoshift("demo", "--out", tmp_path / "demo", "--seeds", 2)
    assert (code, out) == (1, "")
