"""Calibrating a classifier of one's own: against the same facts put together by hand."""

from __future__ import annotations

import copy
import functools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from tests.calibration.same import same as same_facts
from tests.calibration.trained import batches, trained
from tests.toys import same, snapshot
from twoshift import Calibration, TwoshiftWarning, class_moments, recommended
from twoshift import calibrate as calibrate_and_simulate
from twoshift.calibration import _collect, calibration_from, shifts
from twoshift.calibration.facts import FROM_SHIFTS
from twoshift.data.stream import Stream
from twoshift.errors import (
    BatchError,
    CheckpointError,
    DataError,
    HeadError,
    MismatchError,
    ModelError,
    SettingError,
)
from twoshift.estimators._bcts import fit_bcts
from twoshift.methods.eata import fisher_information
from twoshift.models.classifier import prepare

PLAIN, FAIR = "cross_entropy", "balanced_softmax"
calibrate = functools.partial(calibrate_and_simulate, simulate=False)


@pytest.fixture(scope="module", params=[PLAIN, FAIR])
def loss(request):
    return request.param


def logits_of(net, pairs):
    with torch.no_grad():
        return torch.cat([net(x) for x, _ in pairs]), torch.cat([y for _, y in pairs])


def test_it_is_its_parts(loss):
    of = trained(loss)
    pairs = batches(of.held_out)
    facts = calibrate(of.net, pairs)
    logits, labels = logits_of(of.net, pairs)
    by_hand = calibration_from(logits, labels)
    assert same_facts(facts.running, by_hand)
    assert same_facts(facts.facts["moments"], class_moments(of.net, pairs))
    assert same_facts(facts.facts["fisher"], fisher_information(of.net, [x for x, _ in pairs]))
    known = facts.of("running")
    assert known["class_counts"] == of.held_out.counts.tolist()
    np.testing.assert_allclose(known["source_prior"], of.held_out.counts / len(of.held_out))
    assert facts.batch.keys() == facts.running.keys()
    assert facts.held_out
    assert facts.classifier.images == len(of.held_out)
    assert facts.classifier.head == "8"
    inputs = facts.classifier.inputs
    assert (inputs.channels, inputs.size, inputs.low, inputs.high) == (1, (28, 28), 0.0, 1.0)


def test_what_the_logits_contain_is_found_out(loss):
    facts = calibrate(trained(loss).net, batches(trained(loss).held_out))
    assert facts.classifier.reading.sure
    assert facts.classifier.reading.contains == ("training" if loss == PLAIN else "uniform")
    assert (facts.of("running")["assumes"] is None) == (loss == FAIR)


def test_a_contradiction_is_an_error(loss):
    of = trained(loss)
    wrong, right = ("uniform", "training") if loss == PLAIN else ("training", "uniform")
    with pytest.raises(SettingError, match=f"stated to be '{wrong}', but the images say '{right}'"):
        calibrate(of.net, batches(of.held_out), source_prior=wrong)
    assert calibrate(of.net, batches(of.held_out), source_prior=right).classifier.reading


def test_a_distribution_can_be_stated():
    of = trained(PLAIN)
    prior = of.train.counts / len(of.train)
    facts = calibrate(of.net, batches(of.held_out), source_prior=prior)
    np.testing.assert_allclose(facts.of("running")["assumes"], prior)
    with pytest.raises(SettingError, match="images say 'uniform'"):
        calibrate(trained(FAIR).net, batches(of.held_out), source_prior=prior)


def equal_images(images, each=4):
    rows = [np.flatnonzero(images.labels == c)[:each] for c in range(len(images.classes))]
    return images.subset(np.concatenate(rows))


def test_equal_labels_are_asked_about():
    of = trained(PLAIN)
    equal = equal_images(of.held_out)
    for given, seen in ((batches(equal), 1), (equal, 0), (Stream(equal), 0)):  # at once, if known
        calls = []
        with pytest.raises(SettingError, match=r"equally frequent .*class_counts=.*'uniform'"):
            calibrate(of.net, given, progress=lambda *done, calls=calls: calls.append(done))
        assert len(calls) == seen
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TwoshiftWarning)  # few images
        counted = calibrate(of.net, batches(equal), class_counts=of.train.counts.tolist())
        stated = calibrate(of.net, batches(equal), source_prior="uniform", held_out=batches(equal))
    assert counted.of("running")["class_counts"] == of.train.counts.tolist()
    assert counted.of("running")["assumes"] is not None
    assert stated.of("running")["assumes"] is None


def test_a_near_tie_is_a_warning():
    of = trained(PLAIN)
    rows = [np.flatnonzero(of.held_out.labels == c)[: 3 if c < 5 else 1] for c in range(10)]
    few = of.held_out.subset(np.concatenate(rows))
    counts = of.train.counts.tolist()
    with pytest.warns(TwoshiftWarning, match="source_prior="):
        calibrate(of.net, batches(few), held_out=batches(few), class_counts=counts)


def test_images_of_the_training_are_recognised():
    net, of = copy.deepcopy(trained(PLAIN).net), trained(PLAIN)
    with torch.no_grad():
        net[8].weight *= 0.4  # more often right than sure
        net[8].bias *= 0.4
    with pytest.warns(TwoshiftWarning, match="trained on these images.*held_out="):
        facts = calibrate(net, batches(of.train))
    assert not facts.held_out
    assert facts.running["temperature"] == 1
    log_prior = np.log(of.train.counts / len(of.train))
    np.testing.assert_allclose(facts.running["bias"], log_prior.mean() - log_prior, atol=1e-6)
    trusted = calibrate(net, batches(of.train), held_out=batches(of.held_out))
    assert trusted.held_out
    assert trusted.running["temperature"] < 0.9


def test_held_out_images_decide_about_confidence_only():
    of = trained(FAIR)
    facts = calibrate(of.net, batches(of.train), held_out=batches(of.held_out))
    logits, labels = logits_of(of.net, batches(of.held_out))
    temperature, bias = fit_bcts(logits, labels)
    assert facts.running["temperature"] == pytest.approx(temperature)
    torch.testing.assert_close(facts.running["bias"], bias)
    assert facts.of("running")["class_counts"] == of.train.counts.tolist()
    assert same_facts(facts.facts["moments"], class_moments(of.net, batches(of.train)))


def test_normalisation_in_front_is_normalisation_inside():
    class Inside(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net((x - 0.3) / 0.5)

    of = trained(FAIR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TwoshiftWarning)
        inside = calibrate(Inside(of.net), batches(of.held_out))
        outside = calibrate(of.net, batches(of.held_out), mean=0.3, std=0.5)
    assert same_facts(inside.running, outside.running)
    assert outside.classifier.prepared["mean"] == [0.3]


def test_probabilities_are_noticed():
    of = trained(FAIR)
    with pytest.raises(ModelError, match=r"returns probabilities.*softmax"):
        calibrate(nn.Sequential(of.net, nn.Softmax(1)), batches(of.held_out))


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        ([], BatchError, "at least one"),
        (7, BatchError, "pairs of images and labels, got int"),
        ([torch.rand(4, 1, 28, 28)], BatchError, r"a pair \(images, labels\)"),
        ([(torch.rand(4, 1, 28, 28), torch.rand(4))], BatchError, "integers of shape"),
        ([(torch.rand(4, 1, 28, 28), torch.eye(10)[:4])], BatchError, r"y\.argmax\(1\)"),
        ([(torch.rand(4, 1, 28, 28), ["a", "b"])], BatchError, "class numbers"),
        ([(torch.rand(4, 1, 28, 28), torch.tensor([0, 1, 2, 10]))], BatchError, "0 to 9"),
        ([(torch.rand(4, 1, 28, 28), torch.tensor([0, 1, 2, -1]))], BatchError, "0 to 9"),
        ([(torch.rand(4, 3, 28, 28), torch.arange(4))], BatchError, r"\(B, 1, H, W\)"),
        ([(torch.full((4, 1, 28, 28), torch.nan), torch.arange(4))], BatchError, "finite"),
        ([(torch.rand(4, 1, 28, 28), torch.arange(4))], DataError, "none of class 4 and 5 more"),
    ],
)
def test_bad_batches_are_refused(pairs, error, message):
    with pytest.raises(error, match=message):
        calibrate(trained(FAIR).net, pairs)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"source_prior": "balanced"}, SettingError, "auto"),
        ({"class_counts": [1, 2]}, SettingError, "10 numbers"),
        ({"classes": ["a"]}, SettingError, "10 names"),
        ({"head": "nothing"}, HeadError, "no module 'nothing'"),
    ],
)
def test_bad_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        calibrate(trained(FAIR).net, batches(trained(FAIR).held_out), **settings)


def test_the_model_is_untouched():
    of = trained(PLAIN)
    before = snapshot(of.net)
    calibrate(of.net, batches(of.held_out))
    assert same(snapshot(of.net), before)


def test_saved_and_loaded(tmp_path):
    of = trained(PLAIN)
    facts = calibrate(of.net, batches(of.held_out), classes=list("abcdefghij"))
    facts.save(tmp_path / "facts")
    again = Calibration.load(tmp_path / "facts")
    assert same_facts(again.of("running"), facts.of("running"))
    assert same_facts(again.of("batch"), facts.of("batch"))
    assert again.classifier == facts.classifier
    assert again.classifier.classes == tuple("abcdefghij")
    with pytest.raises(CheckpointError, match=r"card\.json"):
        Calibration.load(tmp_path / "nothing")


def test_sorted_batches_give_no_facts_of_batch_statistics():
    of = trained(PLAIN)
    order = np.argsort(of.held_out.labels, kind="stable")
    rows = [order[i : i + 16] for i in range(0, len(order), 16)]
    pairs = [batches(of.held_out.subset(r))[0] for r in rows]
    facts = calibrate(of.net, pairs)
    assert facts.batch == {}
    assert facts.facts["fisher"] is None
    assert facts.running["accuracy"] > 0.5


def test_a_network_without_batch_normalisation():
    of = trained(PLAIN)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.LayerNorm(784), nn.Linear(784, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TwoshiftWarning)
        facts = calibrate(net, batches(of.held_out))
    assert facts.facts["moments"] is None
    assert facts.batch == {}


def test_facts_of_another_model_are_refused():
    facts = calibrate(trained(PLAIN).net, batches(trained(PLAIN).held_out))
    facts.classifier.check(prepare(trained(PLAIN).net))
    facts.classifier.check(prepare(nn.DataParallel(trained(PLAIN).net)))
    with pytest.raises(MismatchError, match="another model"):
        facts.classifier.check(prepare(trained(FAIR).net))
    with pytest.warns(TwoshiftWarning, match="up to rounding"):
        facts.classifier.check(prepare(copy.deepcopy(trained(PLAIN).net).bfloat16()))


def test_progress_is_reported():
    of, calls = trained(PLAIN), []
    calibrate(of.net, of.held_out, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (len(of.held_out), len(of.held_out))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_of_many_images_a_part_is_kept(monkeypatch):
    monkeypatch.setattr(_collect, "NUMBERS", 2000)  # 200 rows of ten
    rows, rng = _collect.Rows(10), np.random.default_rng(0)
    labels = np.concatenate([rng.integers(0, 9, 5000), [9] * 7])
    rng.shuffle(labels)
    for part in np.array_split(labels, 60):
        y = torch.from_numpy(part)
        rows.add(torch.arange(10.0) + y[:, None], y)
    logits, kept = rows.read()
    assert torch.equal(logits[:, 0], kept.float())  # rows stay together
    assert 200 <= len(kept) <= 250
    counts = kept.bincount(minlength=10)
    assert counts.min() >= _collect.LEAST
    assert counts[:9].max() < 50  # about 22 each: none is preferred


def of_shifts(facts):
    return {name: facts.facts[name] for name in FROM_SHIFTS}


@pytest.fixture(scope="module")
def simulated():
    """Facts of a classifier with simulated shifts, and what was reported."""
    of, calls = trained(PLAIN), []
    report = lambda *call: calls.append(call)  # noqa: E731
    return calibrate_and_simulate(of.net, of.held_out, progress=report), calls


def test_shifts_are_simulated(simulated, tmp_path):
    facts, _ = simulated
    found = of_shifts(facts)
    assert {name: tuple(fact.shape) for name, fact in found.items()} == {
        "accuracy_judge": (3, 8),
    }
    assert all(fact.isfinite().all() for fact in found.values())
    facts.save(tmp_path)
    assert same_facts(of_shifts(Calibration.load(tmp_path)), found)
    again = calibrate_and_simulate(trained(PLAIN).net, trained(PLAIN).held_out)
    assert same_facts(of_shifts(again), found)


def test_simulated_streams_are_reported_after_the_images(simulated):
    _, calls = simulated
    images = len(trained(PLAIN).held_out)
    streams = len(shifts.conditions(np.zeros((1, 8, 8, 1)))) * shifts.STREAMS
    assert streams == shifts.STREAMS * (1 + 3 * len(shifts.SEVERITIES))  # gray: no saturation
    first = calls.index((images, images)) + 1
    assert calls[first:] == [(i + 1, streams) for i in range(streams)]


def test_the_expected_accuracy_of_source_images_is_near_theirs(simulated):
    of = trained(PLAIN)
    live = recommended(of.net, simulated[0])
    assert live.expected_accuracy is None  # before the first batch
    right = [live(x).argmax(1) == y for x, y in batches(of.held_out, 32, seed=3)]
    expected, true = live.expected_accuracy, float(torch.cat(right).float().mean())
    assert expected.low <= expected.value <= expected.high
    assert abs(expected.value - true) < 0.1


@pytest.mark.parametrize("case", ["outside 0 to 1", "few", "not wanted", "trained on"])
def test_without_simulation_there_is_no_expected_accuracy(case):
    of = trained(PLAIN)
    net, pairs = of.net, batches(of.held_out)
    settings = {"simulate": case != "not wanted"}
    if case == "outside 0 to 1":
        net, pairs = nn.Sequential(Half(), of.net), [(2 * x, y) for x, y in pairs]
    if case == "few":
        settings |= {"held_out": batches(equal_images(of.held_out))}
    if case == "trained on":
        net, pairs = copy.deepcopy(of.net), batches(of.train)
        with torch.no_grad():
            net[8].weight *= 0.4
            net[8].bias *= 0.4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TwoshiftWarning)
        facts = calibrate_and_simulate(net, pairs, **settings)
    assert of_shifts(facts) == dict.fromkeys(FROM_SHIFTS)
    live = recommended(net, facts)
    live(pairs[0][0])
    assert live.expected_accuracy is None


class Half(nn.Module):
    """For images from 0 to 2."""

    def forward(self, x):
        return x / 2


def test_few_images_are_fewer_than_200():
    assert shifts.LEAST == 200
    assert len(equal_images(trained(PLAIN).held_out)) < 200 < len(trained(PLAIN).held_out)
