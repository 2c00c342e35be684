"""Readings and alarms of live classifiers."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import twoshift
from tests.toys import CLASSES, make_batches, make_method, make_net
from twoshift import TwoshiftError, methods
from twoshift.accuracy import VIEWS, ExpectedAccuracy, read_signals
from twoshift.calibration import Calibration, calibration_from
from twoshift.errors import BatchError, MismatchError, ModelError, SettingError
from twoshift.methods import LiveStream, Source
from twoshift.watch import Watch
from twoshift.watch._unadapted import unadapted
from twoshift.watch.watch import NUMBERS

watch_of = partial(Watch, block=32)


def facts_of(classes=CLASSES, **more):
    """Facts of a classifier that is right in 80 % of cases, without any of its own statistics."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % classes
    shown = torch.where(torch.rand(200, generator=g) < 0.8, labels, labels.roll(1))
    logits = torch.nn.functional.one_hot(shown, classes) * 3.0
    logits = logits + 0.1 * torch.randn(logits.shape, generator=g)
    running = calibration_from(logits, labels)
    known = {"source_prior": torch.full((classes,), 1 / classes, dtype=torch.float64), **more}
    return Calibration(running, {}, True, 0, "", known)


@pytest.mark.parametrize("name", list(methods.methods))
def test_the_unadapted_model_is_found_in_every_method(name):
    shapes = {"iabn": "resnet_iabn", "note": "resnet_iabn", "unmix_tns": "resnet_bn"}.get(
        name, "mlp"
    )
    net = make_net(shapes)
    for adapted in (False, True):
        live = make_method(name, net, adapted)
        batches = make_batches(shapes)
        for x in batches:
            live(x)
        before = live.state()
        found = unadapted(live, facts_of())
        assert torch.equal(found(batches[0]), Source(net)(batches[0]))
        assert all(torch.equal(t, found.state_dict()[n]) for n, t in net.state_dict().items())
        assert all(torch.equal(t, before[n]) for n, t in live.state().items())


@pytest.mark.parametrize("net", ["resnet_gn", "vit", "resnet_bn"])
def test_watching_changes_no_prediction(net):
    x = make_batches(net, (8, 5, 1, 24))
    plain, watched = (make_method("tent", make_net(net), adapted=True) for _ in range(2))
    watch = watch_of(watched, facts_of(), probe=0.5)
    for batch in x:
        assert torch.equal(plain(batch), watch(batch))
        watch.readings  # noqa: B018  without waiting for more
    assert watch.images == 38
    readings = watch.readings
    assert set(readings) == {*NUMBERS, "covariate_distance_by_layer"}
    assert readings["expected_accuracy"] is None  # nothing was simulated
    assert readings["out_of_range"] is None  # nobody knows what images look like
    assert readings["covariate_distance"] is None  # nor their statistics
    assert 0 <= readings["agreement"] <= 1
    assert readings["block"] == 24
    assert len(watch.history) == 4
    assert list(watch.history)[-1]["confidence"] == pytest.approx(readings["confidence"])


def test_readings_are_what_they_say(facts, digits, stream):
    live = twoshift.recommended(digits.net, facts)
    watch = watch_of(live, facts, probe=0.5)
    for x, _ in stream[:6]:
        logits = watch(x)
    readings, expected = watch.readings, live.expected_accuracy
    keys = ("expected_accuracy", "expected_accuracy_low", "expected_accuracy_high")
    assert tuple(readings[name] for name in keys) == tuple(expected)
    assert readings["confidence"] == pytest.approx(float(logits.softmax(1).amax(1).mean()))
    training = np.asarray(facts.facts["source_prior"])
    assert readings["label_distance"] == pytest.approx(
        np.abs(live.prior.numpy() - training).sum() / 2, abs=1e-6
    )
    assert 0 < readings["label_distance_by_chance"] < 0.3
    assert readings["repeated"] < 0.1
    assert readings["out_of_range"] == 0
    layers = readings["covariate_distance_by_layer"]
    assert list(layers) == ["1", "4"]
    assert readings["covariate_distance"] == pytest.approx(np.mean([*layers.values()]))
    assert readings["covariate_distance"] < 0.2
    assert readings["alarms"] == 0
    assert watch.active == []
    assert watch.accuracy == pytest.approx((0.1 + facts.running["accuracy"]) / 2)


def test_agreement_is_counted_on_images_of_both(facts, digits, stream):
    live = twoshift.Tent(digits.net, lr=0.05)
    watch = watch_of(live, facts, probe=1.0)
    (x, _), source = stream[0], Source(digits.net)
    logits = watch(x)
    some = slice(None, None, 2)
    same = logits.argmax(1)[some] == source(x).argmax(1)[some]
    assert watch.readings["agreement"] == pytest.approx(float(same.float().mean()))


def test_a_method_without_a_judge_is_told_by_calibrated_probabilities(facts, digits, stream):
    live = twoshift.Tent(digits.net)
    watch, judge = watch_of(live, facts, probe=0), facts.facts["accuracy_judge"]
    expected = ExpectedAccuracy(10, judge)
    for x, _ in stream[:3]:
        probs = (watch(x).double() / facts.running["temperature"]).softmax(1)
        expected.update(probs, VIEWS.index("plain"))
    assert watch.readings["expected_accuracy"] == pytest.approx(expected.read().value)


def test_the_values_of_images_have_the_expected_accuracy_as_mean(facts, digits, stream):
    """One batch: the mean of what an alarm observes, undone, is what the regression says."""
    live = twoshift.Tent(digits.net)
    watch, (x, _) = watch_of(live, facts, probe=0), stream[0]
    watch(x)
    told = watch._told
    probs = told.probabilities(Source(digits.net)(x).double().numpy())
    predictions = watch._predictions
    predictions.restart()
    predictions.add(probs, probs.argmax(1), 1)
    row = np.asarray(facts.facts["accuracy_judge"][1])
    halves = [predictions.doubts(probs, 1, bound) for bound in (0.4, 0.6)]
    values, (low, high) = halves[0][0], (h[1] for h in halves)
    # the bound moves by as much as accuracy does, in units of the range
    span = 0.2 / (low - high)
    mean = 0.4 + (low - values.mean()) * span
    expected = ExpectedAccuracy(10, torch.tensor(row).expand(3, -1))
    expected.update(torch.from_numpy(probs), 1)
    sums = expected.state()["sums"]
    value = float(read_signals(sums).numpy() @ row[:4] + row[4])
    assert mean == pytest.approx(value, abs=1e-9)


def fed(watch, batches):
    events = []
    for x in batches:
        logits = watch.live(x)
        events += watch.observe(x, logits)
    return events


def test_black_images_are_an_alarm_that_ends(facts, digits, stream, tmp_path):
    live = twoshift.recommended(digits.net, facts)
    watch = watch_of(live, facts, log=tmp_path)
    assert fed(watch, [x for x, _ in stream[:4]]) == []
    dark = torch.zeros(32, 1, 28, 28)
    (raised, *_) = fed(watch, [dark] * 3)
    assert raised.kind in ("inputs", "repeats")
    alarm = next(a for a in watch.active if a.kind == "inputs")
    assert 4 * 32 <= alarm.since <= 5 * 32
    assert alarm.raised <= 7 * 32
    assert alarm.sure > 0.95
    assert "calibration" in alarm.message
    assert "Check the camera" in alarm.advice
    assert watch.readings["alarms"] == len(watch.active) >= 1
    ended = fed(watch, [x for x, _ in stream[4:12]])
    assert {a.kind for a in ended} >= {"inputs"}
    assert all(a.ended is not None for a in ended)
    assert watch.active == []
    assert "over at image" in str(watch.alarms[0])


def test_an_image_that_repeats_is_an_alarm(facts, digits, stream):
    watch = watch_of(twoshift.recommended(digits.net, facts), facts)
    x, _ = stream[0]
    events = fed(watch, [x, *[x[:1].expand(32, -1, -1, -1).contiguous()] * 6])
    assert "repeats" in {a.kind for a in events}


def test_a_collapse_is_an_alarm_and_one_class_is_not(facts, digits, stream):
    live = Source(digits.net)
    watch = watch_of(live, facts, probe=0)
    x, _ = stream[0]
    collapsed = torch.full((32, 10), -3.0)
    collapsed[:, 4] = 3.0
    events = []
    for _ in range(12):
        events += watch.observe(x, collapsed)
    (alarm,) = [a for a in events if a.kind == "collapse"]
    assert "class 4" in alarm.message
    watch.restart()
    images = torch.cat([x for x, _ in stream])
    labels = torch.cat([y for _, y in stream])
    zeros = images[labels == 0]
    noisy = [zeros[torch.randperm(len(zeros))[:32]] for _ in range(12)]
    assert "collapse" not in {a.kind for a in fed(watch, noisy)}


def test_low_accuracy_is_an_alarm(facts, digits):
    watch = watch_of(Source(digits.net), facts, probe=0)
    g = torch.Generator().manual_seed(0)
    events = []
    for _ in range(20):
        unsure = 0.3 * torch.randn(32, 10, generator=g)
        events += watch.observe(torch.rand(32, 1, 28, 28, generator=g), unsure)
    (alarm,) = [a for a in events if a.kind == "accuracy"]
    assert f"below {watch.accuracy:.0%}" in alarm.message


def test_statistics_far_outside_are_an_alarm(facts, digits):
    watch = watch_of(Source(digits.net), replace(facts, classifier=None), probe=1.0)
    g = torch.Generator().manual_seed(0)
    grey = [0.5 + 1e-3 * torch.rand(32, 1, 28, 28, generator=g) for _ in range(12)]
    events = fed(watch, grey)
    assert "statistics" in {a.kind for a in events}
    assert watch.readings["out_of_range"] is None


def test_refused_batches_raise_the_alarm_of_inputs(facts, digits, stream):
    watch = watch_of(twoshift.recommended(digits.net, facts), facts)
    x, _ = stream[0]
    watch(x)
    for _ in range(3):
        with pytest.raises(BatchError, match="Divide by 255"):
            watch(x * 255)
    assert [a.kind for a in watch.active] == ["inputs"]
    with pytest.raises(BatchError, match="NaN"):
        watch(x * math.nan)
    seen = watch.images
    with pytest.raises(BatchError):
        watch(x[:, :, :5])  # a wrong size is a mistake, not an alarm
    assert watch.images == seen


def test_single_images_are_watched_and_take_second_passes_together(facts, digits, stream):
    watch = watch_of(twoshift.recommended(digits.net, facts), facts, probe=0.5)
    images = torch.cat([x for x, _ in stream[:2]])
    for image in images:
        watch(image[None])
    assert watch.images == 64
    assert watch._probe.passes == 2  # of 16 images each, at most half
    assert watch.active == []


@pytest.mark.parametrize("size", [1, 7, 32, 100])
def test_readings_wait_for_a_block_or_for_somebody_who_asks(facts, digits, stream, size):
    images = torch.cat([x for x, _ in stream[:6]])
    live = Source(digits.net)
    watch, whole = (Watch(live, facts, block=96, probe=0.1) for _ in range(2))
    rows = 0
    for x in images.split(size):
        watch.observe(x, live(x))
        rows = len(watch._history)
    for x in images.split(96):
        whole.observe(x, live(x))
    assert rows == {1: 2, 7: 1, 32: 2, 100: 1}[size]
    assert watch.images == 192
    assert watch.readings["images"] == 192
    assert watch.readings["pace"] == pytest.approx(whole.readings["pace"], abs=0.02)
    assert len(watch.history) >= 2


def test_images_of_another_size_do_not_wait_together():
    live = make_method("tent", make_net("resnet_bn"), adapted=False)
    watch = Watch(live, facts_of(), probe=0)
    for size in (16, 24, 16):
        watch(torch.rand(4, 3, size, size))
    assert watch.images == 12
    assert len(watch.history) == 3


def test_a_batch_that_is_written_over_was_seen_as_it_was(facts, digits, stream):
    live = Source(digits.net)
    watch, x = Watch(live, facts), stream[0][0].clone()
    logits = watch(x)
    x.zero_()
    assert logits is not None
    assert watch.readings["out_of_range"] == 0


def test_a_stream_of_several_is_watched_by_itself(facts, digits, stream):
    live = twoshift.recommended(digits.net, facts)
    gate = live.stream("gate")
    assert isinstance(gate, LiveStream)
    watch, other = watch_of(gate, facts), watch_of(live, facts)
    for x, _ in stream[:3]:
        watch(x)
    other(stream[5][0])
    assert watch.readings["images"] == 96
    assert watch.readings["expected_accuracy"] == pytest.approx(gate.expected_accuracy.value)
    assert other.readings["images"] == 32


def test_a_state_goes_on(facts, digits, stream):
    live = twoshift.recommended(digits.net, facts)
    first = watch_of(live, facts)
    dark = torch.zeros(32, 1, 28, 28)
    fed(first, [x for x, _ in stream[:3]] + [dark] * 2)
    second = watch_of(live, facts)
    second.load_state(first.state(), first.images, first.alarms)
    assert (second.images, second.alarms) == (first.images, first.alarms)
    logits = live(stream[3][0])
    assert [w.observe(stream[3][0], logits) for w in (first, second)] == [[], []]
    assert first.readings["pace"] == second.readings["pace"]
    assert first.suspicion == second.suspicion
    assert np.array_equal(first.history.table(), second.history.table(), equal_nan=True)


def test_threads_may_share_a_watch(facts, digits, stream):
    watch = watch_of(twoshift.recommended(digits.net, facts), facts)
    threads = [threading.Thread(target=watch, args=(x,)) for x, _ in stream[:8]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watch.images == 8 * 32
    assert len(watch.history) == 8


def test_mistakes_are_errors(facts, digits):
    live = Source(digits.net)
    with pytest.raises(ModelError, match="what is watched"):
        watch_of(digits.net, facts)
    with pytest.raises(SettingError, match="probe of watch"):
        watch_of(live, facts, probe=2)
    with pytest.raises(SettingError, match="accuracy of watch"):
        watch_of(live, facts, accuracy=70)
    with pytest.raises(TwoshiftError):
        watch_of(live, "nowhere")
    with pytest.raises(SettingError, match=r"facts of watch.*got no temperature"):
        watch_of(live, Calibration({}, {}, True, 0, ""))
    other = make_net("mlp")
    with pytest.raises(MismatchError, match="another model than the one that is watched"):
        watch_of(Source(other), facts)
