"""``twoshift demo`` on its published results: they are not measured again."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.documents import ROOT
from twoshift.bench import Result, demo
from twoshift.priors import named
from twoshift.train import checkpoint

RESULTS = ROOT / "results" / "demo.jsonl"
COUNTS = list(range(10, 0, -1))


def with_trace(line: str) -> Result:
    """Traces are not published: an estimate that comes nearer to the truth, but not all the way."""
    result = json.loads(line)
    truth = named(result["cell"]["labels"], 10)
    estimates = [0.1 + (truth - 0.1) * min(step / 20, 0.8) for step in range(30)]
    s = [float(np.linspace(1, -1, 10) @ e) for e in estimates]
    trace = {"true_prior": truth.tolist(), "prior": [e.tolist() for e in estimates], "s": s}
    return Result.from_json({**result, "trace": trace})


def test_table_plots_and_results_are_those_of_the_results(twoshift, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    results = [with_trace(line) for line in RESULTS.read_text().splitlines()]
    source = SimpleNamespace(card=SimpleNamespace(class_counts=COUNTS))
    monkeypatch.setattr(demo, "run_demo", lambda out, seeds, progress: results)
    monkeypatch.setattr(checkpoint, "load_source", lambda folder: source)
    code, out, _ = twoshift("demo", "--out", tmp_path / "demo")
    assert code == 0
    assert "IABN + adapter, oracle prior" in out
    made = {path.name: path.read_bytes() for path in (tmp_path / "demo").iterdir()}
    assert made.pop("results.jsonl") == RESULTS.read_bytes()
    assert made.pop("table.md") == RESULTS.with_name("demo.md").read_bytes()
    assert all(content.startswith(b"\x89PNG") for content in made.values())
    assert set(made) == {"accuracy_against_shift.png", "label_estimate.png"}
