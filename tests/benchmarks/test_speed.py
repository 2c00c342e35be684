import itertools
import json
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks import exported, speed, speed_report, timing
from twoshift import methods, models
from twoshift.adapters import LabelShiftAdapter
from twoshift.bench.cost import cost, count_macs, parameters
from twoshift.methods import IABN, BNStats, Source, Tent


@pytest.fixture
def tiny(monkeypatch):
    """The same benchmark on batches that cost nothing.

    Not on a narrower network: oneDNN (issue 6035) writes past its scratch space in the weight
    gradient of a strided 1x1 convolution, channels last, with fewer than 16 input channels.
    """
    threads = torch.get_num_threads()
    few = {"RECOMMENDED": {(16, 4, 2): 1.35, (16, 1, 1): None}, "ESTIMATE_MS": {10: 0.5, 20: 20.0}}
    for name, value in {"BATCH": 4, "SIZE": 8, "THREADS": threads, **few}.items():
        monkeypatch.setattr(speed, name, value)
    yield
    torch.set_num_threads(threads)


def mlp_size(*sizes):
    return sum(a * b + b for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize(("d", "classes"), [(512, 100), (2048, 1000)])
def test_parameters_by_hand(d, classes):
    expected = mlp_size(1, 100, 2 * d) + mlp_size(1, 100, 2 * classes)
    assert parameters(LabelShiftAdapter(d, classes)) == expected


@pytest.mark.parametrize(("d", "classes"), [(512, 100), (6, 5)])
def test_adapter_macs_by_hand(d, classes):
    networks = 100 + 100 * 2 * d + 100 + 100 * 2 * classes
    degree, mean_feature = classes, d  # m'pi, and the one number that dW multiplies
    assert speed.adapter_macs(d, classes) == networks + degree + mean_feature


def test_model_macs_by_hand():
    net, size = models.create("resnet18_cifar", classes=7, width=4), speed.SIZE
    total, sides = 0, {"layer2": 2, "layer3": 4, "layer4": 8}
    for name, layer in net.named_modules():
        if isinstance(layer, nn.Conv2d):
            side = size // sides.get(name.split(".")[0], 1)
            total += layer.weight.numel() * side * side
        elif isinstance(layer, nn.Linear):
            total += layer.weight.numel()
    assert cost("resnet18_cifar", {"width": 4}, 7, size) == (total, parameters(net))


def test_counts_are_in_their_limits(tiny):
    checks = speed.count_checks()
    assert [c.name for c in checks if not c.ok] == []
    limited = [c for c in checks if c.high is not None]
    assert len(limited) == 4


def test_tent_computes_no_gradient_of_a_frozen_weight(tiny):
    tent = Tent(speed.network())
    assert speed.frozen_gradients(tent) == 0
    moving = [p for p in tent.parameters() if p.requires_grad]
    assert moving
    assert all(p.grad is not None for p in moving)


def test_a_gradient_that_should_not_be_is_seen(tiny):
    class Leaky(Tent):
        def adapt(self, x):
            logits = super().adapt(x)
            self.model.conv1.weight.grad = torch.zeros_like(self.model.conv1.weight)
            return logits

    assert speed.frozen_gradients(Leaky(speed.network())) == 1


def test_gradients_of_weights_would_show_in_the_macs(tiny):
    net, (x,) = speed.network(), speed.batches(1)
    forward = count_macs(speed.plain_forward(net).run)
    tent = Tent(net)
    assert count_macs(lambda: tent(x)) / forward < 2
    everything = speed.training(net, backward=True)
    assert count_macs(everything.run) / forward > 2.5


@pytest.mark.parametrize(
    ("kind", "norm", "passes"),
    [(Source, "bn", (1, 0)), (BNStats, "bn", (1, 0)), (Tent, "bn", (1, 1)), (IABN, "iabn", (2, 1))],
)
def test_passes_per_batch(tiny, kind, norm, passes):
    assert speed.passes_per_batch(kind(speed.network(norm))) == passes


def test_candidates_take_turns_and_start_afresh():
    calls = []
    candidates = {
        n: timing.Candidate(lambda n=n: calls.append(n), lambda n=n: calls.append(f"reset {n}"))
        for n in "abc"
    }
    times = timing.take_turns(candidates, timing.REFRESH + 2)
    assert {n: len(t) for n, t in times.items()} == dict.fromkeys("abc", timing.REFRESH + 2)
    assert min(min(t) for t in times.values()) > 0
    fresh = [word for n in "abc" for word in (f"reset {n}", n, n)]
    assert calls[: len(fresh)] == fresh
    assert calls[len(fresh) :][:9] == list("abcbcacab")
    assert calls.count("reset a") == 2


def test_the_ratio_is_taken_inside_a_round():
    times = {"slow": [2.0, 20.0, 300.0], "base": [1.0, 10.0, 100.0]}  # a machine that gets busy
    assert timing.ratios(times, "slow", "base") == [2, 2, 3]
    check = timing.timed("slow / base", times, "slow", "base", high=1.9)
    assert (check.value, check.ok) == (2, False)


@pytest.mark.parametrize(
    ("value", "low", "high", "ok"),
    [(1, 0.9, 1.1, True), (1.2, 0.9, 1.1, False), (0.8, 0.9, 1.1, False), (9, 0, None, True)],
)
def test_limits(value, low, high, ok):
    assert timing.Check("x", value, low, high).ok is ok


def test_a_limit_is_broken_if_the_lower_quartile_is_above_it():
    times = {"slow": [2.0, 2.0, 3.0, 3.0, 9.0], "base": [1.0] * 5}
    assert timing.timed("", times, "slow", "base", high=2).ok
    assert not timing.timed("", times, "slow", "base", high=1.99).ok
    assert timing.milliseconds("", [0.002, 0.003, 0.004], 2.5).ok
    assert not timing.milliseconds("", [0.002, 0.003, 0.004], 2.4).ok


def test_all_classes_are_predicted_and_memories_fill():
    """With noise and an untrained head, all images would be of one class."""
    stream, net = speed.batches(2, 32), speed.network()
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in stream)
    assert {(tuple(x.shape), x.dtype) for x in stream} == {((32, 3, 32, 32), torch.float32)}
    with torch.no_grad():
        predicted = net(torch.cat(stream)).argmax(1)
    assert len(set(predicted.tolist())) >= 8
    _, rotta = speed.make_method("rotta")
    for x in stream:
        rotta(x)
    assert len(rotta.memory["images"]) > rotta.capacity / 2


def test_label_estimates_by_name(tiny):
    checks = speed.estimate_checks(4, ["ema", "decayed_counts"])
    assert [(c.name, c.high, c.unit) for c in checks] == [
        ("label estimate ema, C=10", 0.5, "ms"),
        ("label estimate ema, C=20", 20.0, "ms"),
        ("label estimate decayed_counts, C=10", 0.5, "ms"),
        ("label estimate decayed_counts, C=20", 20.0, "ms"),
    ]
    assert all(c.value > 0 for c in checks)


def test_a_bare_step_is_what_tent_does(tiny):
    tent, bare = (Tent(speed.network()) for _ in range(2))
    for x in speed.batches(4):
        tent(x)
    candidate = speed.bare_step(bare)
    for _ in range(4):
        candidate.run()
    states = tent.state(), bare.state()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["model.bn1.weight"], tent._initial["model.bn1.weight"])


def test_every_method_has_a_row():
    assert {speed.VARIANTS.get(row, (row,))[0] for row in speed.rows()} == set(methods.methods)


@pytest.mark.parametrize("row", speed.rows())
def test_every_method_can_be_measured(tiny, row):
    norm, method = speed.make_method(row)
    assert norm in ("bn", "iabn")
    assert speed.passes_per_batch(method)[0] >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_is_in_megabytes():
    before = timing.resident("VmRSS")
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert timing.resident("VmRSS") - before == pytest.approx(64, abs=8)
    assert timing.resident("VmHWM") >= before + len(block) / 2**20 - 8


@pytest.mark.parametrize("broken", [False, True])
def test_the_command(tiny, monkeypatch, tmp_path, broken):
    def some_times(candidates, rounds):
        for candidate in candidates.values():
            candidate.run()
        return {name: [1e-4] * rounds for name in candidates}

    if broken:
        monkeypatch.setattr(speed, "PAPER_MACS", 1.0)  # reported only: breaks nothing
        monkeypatch.setattr(speed, "EXPECTED_PARAMETERS", 1.0)
    monkeypatch.setattr(speed, "take_turns", some_times)
    monkeypatch.setattr(speed, "peak_memory_of", lambda names: dict.fromkeys(names, 1.0))
    monkeypatch.setattr(speed, "exported_checks", lambda rounds: [])  # by itself, below
    app = speed.typer.Typer()
    app.command()(speed.main)
    out = tmp_path / "deep" / "speed.json"
    result = CliRunner().invoke(app, ["--quick", "--out", str(out)])
    assert result.exit_code == (1 if broken else 0), result.output
    assert ("FAIL" in result.output) == broken
    record = json.loads(out.read_text())
    assert set(record["methods"]) == set(speed.rows())
    page = speed_report.page(record, record | {"settings": {**record["settings"], "size": 8}})
    assert all(f"| {row} | " in page for row in speed.rows())
    failed = [c["name"] for c in record["checks"] if not c["ok"]]
    assert failed == (["adapter parameters / 0.124M"] if broken else [])


def test_a_place_that_cannot_be_written_is_a_sentence(tiny, monkeypatch, tmp_path):
    for kind in ("count", "norm", "tent", "baseline", "recommended", "exported", "estimate"):
        monkeypatch.setattr(speed, f"{kind}_checks", lambda *arguments: [])
    monkeypatch.setattr(speed, "method_costs", lambda rounds: {})
    (tmp_path / "file").touch()
    app = speed.typer.Typer()
    app.command()(speed.main)
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "file" / "speed.json")])
    assert result.exit_code == 2


def test_without_onnxruntime_it_says_so(tiny, monkeypatch, capsys):
    monkeypatch.setattr(exported, "find_spec", lambda name: None if name == "onnx" else 1)
    assert speed.exported_checks(2) == []
    assert "was not timed: no onnx; see twoshift[onnx]" in capsys.readouterr().err


@pytest.mark.slow
def test_onnxruntime_beside_torch(tiny, monkeypatch):
    predicted = {}

    def once(candidates, rounds):
        predicted.update({name: candidate.run() for name, candidate in candidates.items()})
        return {name: [1e-4] * rounds for name in candidates}

    monkeypatch.setattr(speed, "take_turns", once)
    checks = speed.exported_checks(2)
    assert len(checks) == 4
    assert all(check.ok and check.high is None for check in checks)
    (logits,) = predicted["onnxruntime"]
    assert logits.shape == predicted["with labels"].shape == tuple(predicted["forward"].shape)
    assert abs(predicted["with labels"] - logits).max() < 1  # the labels of this image only


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_of_fresh_processes():
    peaks = speed.peak_memory_of(["source", "tent"])
    assert 0 < peaks["source"] < peaks["tent"] < 4000
