"""What is published of the expected accuracy: windows, errors, and the page made of them."""

import json
import math

import numpy as np
import pytest
import torch

from reproduction import accuracy, accuracy_page
from reproduction import accuracy_features as features
from tests.documents import ROOT
from twoshift.accuracy import others
from twoshift.adapters import adapted_heads, attach, logit_adapter
from twoshift.data.base import ImageSet
from twoshift.data.stream import Stream
from twoshift.estimators import Paced
from twoshift.methods import LabelAware, Streamed
from twoshift.methods.matched import class_moments
from twoshift.testing import make_network

RECORD = json.loads((ROOT / accuracy.FILE).read_text())
STUDY = json.loads((ROOT / features.FILE).read_text())
PAGE = (ROOT / "docs/accuracy.md").read_text()


def rows(corruption="fog", severity=1, labels="uniform", **changes):
    row = {
        "corruption": corruption,
        "severity": severity,
        "labels": labels,
        "right": 0.7,
        "low": 0.6,
        "high": 0.8,
    }
    return [{**row, **changes}]


def test_errors_and_intervals_are_counted_by_part():
    told = {accuracy.OURS: 0.75, "mean confidence": 0.9, accuracy.SCORE: 0.2}
    later = {accuracy.OURS: 0.73, "mean confidence": 0.84, accuracy.SCORE: 0.1, accuracy.AETTA: 0.5}
    found = accuracy.summary([*rows(estimates=told), *rows("snow", 5, right=0.83, estimates=later)])
    ours = found["errors"][accuracy.OURS]
    assert ours["all"] == pytest.approx((5 + 10) / 2)
    assert (ours["1"], ours["5"]) == (pytest.approx(5), pytest.approx(10))
    assert ours["mean"] == pytest.approx((5 - 10) / 2)
    assert ours["standard_error"] == pytest.approx(np.std([5, 10], ddof=1) / math.sqrt(2))
    other = found["errors"]["mean confidence"]  # errors 20 and 1
    assert other["more"] == pytest.approx((15 - 9) / 2)
    assert other["more_standard_error"] == pytest.approx(np.std([15, -9], ddof=1) / math.sqrt(2))
    assert found["order"][accuracy.OURS] == pytest.approx(-1)  # more was expected where less is
    assert found["interval"]["all"] == {"covered": 50, "width": pytest.approx(20)}
    assert found["interval"]["5"]["covered"] == 0  # 0.83 is above 0.8
    assert accuracy.SCORE not in found["errors"]
    assert [c["corruption"] for c in found["conditions"]] == ["snow", "fog"]  # the worst first
    assert found["with_aetta"]["windows"] == 1
    assert found["with_aetta"]["errors"][accuracy.AETTA] == pytest.approx(33)


def live_toy():
    net, generator = make_network("resnet_bn", seed=0), torch.Generator().manual_seed(0)
    x, y = torch.rand(60, 3, 8, 8, generator=generator), torch.arange(60) % 5
    adapter = logit_adapter(net, temperature=1.5)
    moments = class_moments(net, [(x, y)])
    method = Streamed(attach(net, adapter), moments)
    judge = torch.tensor([[1.0, 0, 0, 0, 0, -0.1, 0.1, 0.5]] * 3)
    return LabelAware(method, Paced(adapter.classes, temperature=1.5), judge)


def toy_stream(images=1088):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (images, 8, 8, 3)).astype(np.uint8)
    labels = np.arange(images) % 5
    return Stream(ImageSet("toy", "test", pixels, labels, tuple("abcde"), origin="toy"))


def test_windows_hold_what_was_answered():
    known = {"accuracy": 0.5, "confidence": 0.4, "threshold": 0.3}
    live, again, prior = live_toy(), live_toy(), [0.2] * 5
    found = list(accuracy.windows(live, toy_stream(), known, prior, drop=True))
    assert len(found) == 1088 // accuracy.WINDOW
    answers, labels = [], []
    for batch in toy_stream():
        answers.append(again(batch.x).detach())
        labels.append(batch.y)
        if len(answers) == 16:
            break
    probs, y = torch.cat(answers[8:]).softmax(1), torch.cat(labels[8:])
    last = found[1]
    assert last["right"] == pytest.approx(float((probs.argmax(1) == y).float().mean()))
    expected = again.expected_accuracy
    assert last["estimates"][accuracy.OURS] == pytest.approx(expected.value, abs=1e-6)
    assert (last["low"], last["high"]) == pytest.approx(expected[1:], abs=1e-6)
    estimates = last["estimates"]
    assert estimates["mean confidence"] == pytest.approx(others.mean_confidence(probs), abs=1e-5)
    assert estimates["DoC"] == pytest.approx(estimates["mean confidence"] + 0.1, abs=1e-5)
    assert estimates["COT"] == pytest.approx(others.transport(probs, prior), abs=1e-5)
    q_cot = others.transport(probs, again.prior.double())
    assert estimates["Q-COT"] == pytest.approx(q_cot, abs=1e-5)
    assert 0 <= estimates[accuracy.AETTA] <= 1


def test_features_are_those_of_the_pass_that_was_answered_by():
    live = live_toy()
    head = next(head for _, head in adapted_heads(live))
    for logits, _, h in accuracy.seen(live, toy_stream(1400)):
        torch.testing.assert_close(head.shifted(h), logits)


def test_an_interrupted_measurement_continues(tmp_path, monkeypatch):
    done, file = [], tmp_path / "accuracy.json"

    def one(live, source, name, known, data):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(name)
        return rows(name)

    class Source:
        weights = "abc"

    monkeypatch.setattr(accuracy, "load_source", lambda folder: Source())
    monkeypatch.setattr(accuracy, "recommended_of", lambda source: None)
    monkeypatch.setattr(accuracy, "source_facts", lambda live, data: {})
    monkeypatch.setattr(accuracy, "measure_corruption", one)
    monkeypatch.setattr(accuracy, "load", lambda *arguments: None)
    monkeypatch.setattr(accuracy, "corrupted", lambda *arguments, **root: toy_stream(64).data)
    monkeypatch.setattr(accuracy, "summary", lambda rows: {})
    monkeypatch.setattr(accuracy, "BENCHMARK", ("fog", "snow", "frost"))
    with pytest.raises(KeyboardInterrupt):
        accuracy.measure(tmp_path, tmp_path, file)
    done[:] = done[1:]
    accuracy.measure(tmp_path, tmp_path, file)
    assert done == ["snow", "frost"]  # fog and snow were there
    assert [r["corruption"] for r in json.loads(file.read_text())["rows"]] == [
        "fog",
        "snow",
        "frost",
    ]
    done.clear()
    Source.weights = "other"  # of another model, everything is measured anew
    with pytest.raises(KeyboardInterrupt):
        accuracy.measure(tmp_path, tmp_path, file)
    assert done == ["fog", "snow"]


def some_rows(count=60, seed=0):
    rng = np.random.default_rng(seed)
    signals = rng.random((count, 8))
    right = np.clip(0.5 * signals[:, 0] + 0.2 + rng.normal(0, 0.05, count), 0, 1)
    index = np.arange(count)
    return features.Rows(signals, right, index % 3, np.zeros(count, int), index // 3 % 2)


def test_a_corruption_is_judged_by_the_others_alone():
    seen, columns, rule = some_rows(), [0, 1, 2, 3], features.quantiles
    inside, size = [], []
    for group in range(3):
        fit = [i for i in range(60) if seen.group[i] != group]
        inner = []  # errors on each of the other two, by a regression on the third
        for left in {0, 1, 2} - {group}:
            rest = seen.of(np.array([i for i in fit if seen.group[i] != left]))
            told = features.predictor(rest, columns)
            inner += [
                seen.right[i] - told(seen.signals[[i]])[0] for i in fit if seen.group[i] == left
            ]
        low, high = np.quantile(inner, [0.025, 0.975])
        told = features.predictor(seen.of(np.array(fit)), columns)
        for i in range(group, 60, 3):
            error = seen.right[i] - told(seen.signals[[i]])[0]
            size.append(abs(error))
            inside.append(low <= error <= high)
    found = features.judged(seen, columns, rule)
    assert found["error"] == pytest.approx(100 * np.mean(size))
    assert found["covered"] == pytest.approx(100 * np.mean(inside))
    assert found["least_covered"] <= found["covered"]


def test_adjustments_apart_are_two_regressions():
    seen = some_rows()
    parts = [seen.of(seen.adjustment == a) for a in (0, 1)]
    errors = [features.judged(part, [0, 1])["error"] for part in parts]
    assert features.judged_apart(seen, [0, 1])["error"] == pytest.approx(np.mean(errors))
    assert features.judged(seen, [0, 1])["error"] != pytest.approx(np.mean(errors))


def test_rules_of_intervals():
    errors, group = np.concatenate([np.linspace(-1, 3, 41), [0.0] * 41]), np.repeat([0, 1], 41)
    first = np.quantile(errors[:41], [0.025, 0.975])
    assert features.worst_group(errors, group) == pytest.approx(tuple(first))
    low, high = features.quantiles(errors, group)
    assert (low, high) == pytest.approx(tuple(np.quantile(errors, [0.025, 0.975])))
    assert features.stretched(errors, group) == pytest.approx((3 * low, 3 * high))
    size = np.quantile(np.abs(errors[:41]), 0.95)
    assert features.worst_symmetric(errors, group) == pytest.approx((-size, size))


def test_covariate_distance_layer_by_layer():
    live = live_toy().method
    assert features.distances(torch.nn.Identity()) == (0, 0)
    live(toy_stream(64)._batch(0).x)
    expected = live._source.mixture(live.prior.double())
    means, variances, first = [], [], 0
    for layer in live._layers:
        each = [[], []]
        for c in range(layer.num_features):
            mean, var = (float(v) for v in live.followed[:, first + c])
            source_mean, source_var = (float(v) for v in expected[:, first + c])
            each[0].append((mean - source_mean) ** 2 / (source_var + 1e-5))
            each[1].append(abs(math.log((var + 1e-5) / (source_var + 1e-5))))
        first += layer.num_features
        means.append(np.mean(each[0]))
        variances.append(np.mean(each[1]))
    expected = math.log(np.mean(means)), math.log(np.mean(variances))
    assert features.distances(live) == pytest.approx(expected, rel=1e-4)


def test_what_is_published_is_whole():
    seen = {(r["corruption"], r["severity"], r["labels"], r["window"]) for r in RECORD["rows"]}
    assert len(seen) == len(RECORD["rows"]) == 15 * 3 * 3 * 3
    with_aetta = [r for r in RECORD["rows"] if accuracy.AETTA in r["estimates"]]
    assert len(with_aetta) == 4 * 3 * 3
    assert json.loads(json.dumps(accuracy.summary(RECORD["rows"]))) == RECORD["summary"]
    assert tuple(STUDY["results"]) == features.NETWORKS


def test_the_page_is_made_of_the_records():
    assert accuracy_page.page(RECORD, STUDY) == PAGE


def test_numbers_of_the_page_come_from_windows():
    def error(name, **condition):
        own = [r for r in RECORD["rows"] if condition.items() <= r.items()]
        return sum(abs(r["estimates"][name] - r["right"]) for r in own) / len(own) * 100

    line = next(x for x in PAGE.splitlines() if x.startswith("| **expected accuracy** |"))
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    assert cells[0] == f"{error(accuracy.OURS):.1f}"
    assert cells[3] == f"{error(accuracy.OURS, severity=5):.1f}"
    assert cells[6] == f"{error(accuracy.OURS, labels='backward-50'):.1f}"
    inside = [r["low"] <= r["right"] <= r["high"] for r in RECORD["rows"]]
    assert f"{100 * sum(inside) / len(inside):.1f} %" in PAGE
    present = STUDY["results"]["cifar10-bn"]["matched"]["signals"]["present signals"]
    assert f"| present signals | {present['error']:.1f} / {present['width']:.1f} |" in PAGE


def test_a_target_that_is_missed_is_said_to_be():
    assert "**missed**" not in accuracy_page._met(True)
    worse = json.loads(json.dumps(RECORD["summary"]))
    worse["errors"][accuracy.OURS]["all"] = 9.9
    assert "9.9 points" in (verdict := accuracy_page._errors(worse)["verdict"])
    assert "**missed**" in verdict
