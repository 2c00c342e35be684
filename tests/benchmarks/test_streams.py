import json
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

import twoshift
from benchmarks import speed, speed_report, streams
from benchmarks.timing import Check
from twoshift import Calibration, Paced
from twoshift.models.norm import batch_norms

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The same benchmark on a network that costs nothing, in this process."""
    threads = torch.get_num_threads()
    few = {"BACKBONE": "resnet18_cifar", "WIDTH": 4, "SIZE": 8, "CLASSES": 3, "MANY_CLASSES": 12}
    for name, value in {**few, "FEW": 3, "READS": 2, "BATCH": 4, "THREADS": threads}.items():
        monkeypatch.setattr(streams, name, value)
    monkeypatch.setattr(streams, "in_fresh_process", lambda measure, *args: measure(*args))


@pytest.mark.parametrize("classes", [3, 100])
def test_what_is_measured_is_adjusted_and_not_left_alone(classes):
    net = streams.network(classes)
    live = twoshift.recommended(net, streams.facts(net, classes))
    assert "Streamed" in live.describe()
    assert live.estimator.temperature == 1
    net = speed.network()
    assert "Streamed" in twoshift.recommended(net, speed.calibrated(net, 10, 8)).describe()


@linux
def test_the_tensors_of_a_stream_are_counted(monkeypatch):
    memory = streams.stream_memory(500)
    assert memory.tensors / 2 < memory.resident < 20 * memory.tensors
    channels = sum(layer.num_features for _, layer in batch_norms(streams.network(3)))
    # votes, statistics, images, distance, what images look like; prior of the head
    numbers = 3 + 2 * channels + 1 + 1 + 3 + 2 * 3 * 3 + 3
    estimate = sum(tensor.nbytes for tensor in Paced(3).state().values())
    generator = torch.Generator().get_state().nbytes
    assert memory.tensors * 1e6 == pytest.approx(4 * numbers + estimate + generator)
    sizes = iter([100.0, 100.0 + 2 * 1e6 / 2**20])
    monkeypatch.setattr(streams, "resident", lambda key: next(sizes))
    assert streams.stream_memory(2).resident == pytest.approx(1)


def test_every_read_is_of_another_stream_and_the_limit_is_per_switch(monkeypatch):
    used = []
    switched = twoshift.methods._streams.Streams._switch

    def switch(self, method, stream):
        used.append(stream is not self._active)
        switched(self, method, stream)

    def one_second_each(candidates, rounds):
        for candidate in candidates.values():
            candidate.run()
            used.clear()
            candidate.run()
            counts.append(sum(used))
        return {name: [1.0] * rounds for name in candidates}

    counts = []
    monkeypatch.setattr(twoshift.methods._streams.Streams, "_switch", switch)
    monkeypatch.setattr(streams, "take_turns", one_second_each)
    checks = streams.switch_checks(2)
    assert counts == [streams.READS, 1, 0]  # reads, calls of others, calls of the same one
    assert checks[0] == Check("switch to another stream", 500, high=1, unit="ms", spread=(500, 500))
    assert not checks[0].ok


@linux
def test_a_calibration_is_saved_and_loaded_and_used(tmp_path):
    calibrate = streams.calibrating(tmp_path / "facts")
    assert Calibration.load(tmp_path / "facts").classifier is not None
    save = streams.saving(tmp_path / "facts", tmp_path / "again")
    assert (tmp_path / "again" / "card.json").exists()
    for cost in (calibrate, save, streams.loading(tmp_path / "facts")):
        assert cost.seconds > 0
    assert streams.predicting(tmp_path / "facts").seconds > 0


@linux
def test_the_meter_sees_what_is_freed_again():
    peak = streams.meter()
    torch.ones(64 * 2**20, dtype=torch.uint8)
    assert peak() == pytest.approx(67, abs=10)


@linux
@pytest.mark.parametrize("broken", [False, True])
def test_the_command(monkeypatch, tmp_path, broken):
    def some_times(candidates, rounds):
        return {name: [1e-6] * rounds for name in candidates}

    monkeypatch.setattr(streams, "take_turns", some_times)
    monkeypatch.setattr(streams, "clocked", lambda run: (9.0 if broken else 0.1, run()))
    app = typer.Typer()
    app.command()(streams.main)
    out = tmp_path / "streams-speed.json"
    result = CliRunner().invoke(app, ["--quick", "--out", str(out)])
    assert result.exit_code == (1 if broken else 0), result.output
    record = json.loads(out.read_text())
    failed = {c["name"] for c in record["checks"] if not c["ok"]}
    slow = {"Calibration.save, C=12", "Calibration.load, C=12"}
    assert failed == (slow if broken else set())


def test_the_page_has_both_measurements(tmp_path):
    settings = {"network": "a network", "batch": [1, 3, 8, 8], "size": 8, "threads": 1}
    more = {"machine": "a machine", "versions": {"torch": "2"}}
    check = {"value": 1.0, "low": 0.0, "high": None, "unit": "ms", "spread": None, "ok": True}
    for file, name in {"speed.json": "a ratio", "streams-speed.json": "a switch"}.items():
        content = {"settings": settings | more, "methods": {}, "checks": [{**check, "name": name}]}
        (tmp_path / file).write_text(json.dumps(content))
    speed_report.main(tmp_path, tmp_path / "speed.md")
    before, after = (tmp_path / "speed.md").read_text().split("## Many streams, many classes")
    assert "| a ratio | 1 ms |" in before
    assert "| a switch | 1 ms |" in after
