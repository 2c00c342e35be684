from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from tests.bench.stored import make_result, without_trace
from twoshift.bench.track import title, tracker
from twoshift.errors import MissingExtra, StorageError, UnknownName

CURVE = [0.5, 0.51, 0.52]


@pytest.mark.parametrize(
    ("result", "name"),
    [
        (make_result(2), "tent contrast-5 uniform seed2"),
        (make_result(0, adapter="trained"), "tent+trained contrast-5 uniform seed0"),
    ],
)
def test_titles(result, name):
    assert title(result) == name


def test_a_clean_stream_has_no_severity():
    result = make_result()
    clean = replace(result, cell=replace(result.cell, corruption="clean"))
    assert title(clean) == "tent clean uniform seed0"


def test_an_unknown_tracker(tmp_path):
    with pytest.raises(UnknownName, match="Did you mean 'mlflow'"):
        tracker("mlfow", "table", tmp_path)


@pytest.mark.parametrize(
    ("kind", "package"),
    [("mlflow", "mlflow"), ("tensorboard", "torch.utils.tensorboard")],
)
def test_a_missing_package(tmp_path, monkeypatch, kind, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'twoshift\[{kind}\]'"):
        tracker(kind, "table", tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write"):
        tracker("tensorboard", "table", tmp_path / "file" / "runs")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of MLflow's own packages
def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("alembic")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    result = make_result(1, adapter="trained", batches=700)  # more than goes at once
    for logged in (result, without_trace(make_result(2))):
        track = tracker("mlflow", "my table", tmp_path / "runs")  # the second adds to the first
        track.log(logged)
        track.close()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("my table")
    runs = {r.data.params["seed"]: r for r in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"1", "2"}
    run = runs["1"]
    assert (run.info.run_name, run.info.status) == (title(result), "FINISHED")
    assert run.data.params["key"] == result.key
    assert run.data.params["adapter"] == "trained"
    assert run.data.metrics["accuracy"] == 0.5
    assert "tail_recall" not in run.data.metrics
    curve = client.get_metric_history(run.info.run_id, "batch_accuracy")
    assert [(m.step, m.value) for m in curve] == list(enumerate(result.trace["accuracy"]))
    assert len(client.get_metric_history(run.info.run_id, "batch_s")) == 700
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "gopher://nowhere")
    with pytest.raises(StorageError, match="MLflow refuses"):
        tracker("mlflow", "my table", tmp_path)


@pytest.mark.filterwarnings("ignore")  # of TensorBoard's own packages
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track = tracker("tensorboard", "table", tmp_path / "runs")
    for seed in (1, 2):
        track.log(make_result(seed, adapter="trained", accuracy=seed / 4))
    track.close()
    folders = sorted({f.parent for f in (tmp_path / "runs").rglob("events.out.tfevents.*")})
    assert [f.relative_to(tmp_path).parts[:3] for f in folders] == [
        ("runs", "table", "tent+trained")
    ] * 2
    events = EventAccumulator(str(folders[0])).Reload()
    curve = [(e.step, e.value) for e in events.Scalars("batch_accuracy")]
    assert curve == [(i, pytest.approx(v)) for i, v in enumerate(CURVE)]
    assert [e.value for e in events.Scalars("accuracy")] == [0.25]
    assert "_hparams_/session_start_info" in events.PluginTagToContent("hparams")
