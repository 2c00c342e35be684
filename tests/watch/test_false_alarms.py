"""How often a healthy stream raises an alarm: at most as often as promised."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import twoshift
from tests.documents import ROOT
from twoshift.calibration import Calibration
from twoshift.data import load
from twoshift.data.label_shift import draw
from twoshift.data.stream import to_float
from twoshift.methods import Source
from twoshift.methods._appearance import Appearances
from twoshift.train.adapter import source_images
from twoshift.train.checkpoint import load_source
from twoshift.watch import Watch

ALPHA = 0.05


def false_alarms(watch, images, logits, streams, batches, size):
    """Share of streams, drawn from images at random, that raise an alarm."""
    rng, false = np.random.default_rng(0), []
    for _ in range(streams):
        watch.restart()
        for _ in range(batches):
            rows = torch.from_numpy(rng.integers(len(images), size=size))
            watch.observe(images[rows], logits[rows])
        false += [sorted({alarm.kind for alarm in watch.alarms})] if watch.alarms else []
    return len(false) / streams, false


@pytest.mark.parametrize("size", [1, 32])
def test_digits_hardly_ever_raise_an_alarm(facts, digits, size):
    images = to_float(digits.held_out.images[:])
    live = Source(digits.net)
    share, which = false_alarms(Watch(live, facts, probe=0.1), images, live(images), 60, 12, size)
    assert share <= ALPHA, which


@pytest.mark.slow
@pytest.mark.parametrize(("size", "batches"), [(4, 240), (64, 60)])
def test_a_thousand_source_streams_hardly_ever_raise_an_alarm(shared_data, size, batches):
    """Test images with the labels of the training; what was known came from training images."""
    folder = ROOT / "checkpoints" / "cifar10-bn"
    source, facts = load_source(folder), Calibration.load(folder)
    looks = Appearances()
    looks.add(to_float(source_images(source, shared_data).images[:]))
    facts = replace(facts, classifier=replace(facts.classifier, appearance=looks.read()))
    test = load("cifar10", "test", shared_data)
    rows = draw(test.labels, np.asarray(facts.facts["source_prior"]), 0, None, 2000)
    images = to_float(np.array(test.images[rows]))
    live = Source(source.model)
    with torch.inference_mode():
        logits = torch.cat([live(part) for part in images.split(100)])
    watch = Watch(live, facts)
    share, which = false_alarms(watch, images, logits, 1000, batches, size)
    assert share <= ALPHA, which


@pytest.mark.slow
def test_adapting_methods_on_source_streams(shared_data):
    """The live classifier adapts for real: fewer streams, of the same length."""
    folder = ROOT / "checkpoints" / "cifar10-bn"
    source, facts = load_source(folder), Calibration.load(folder)
    test, rng, false = load("cifar10", "test", shared_data), np.random.default_rng(1), []
    rows = draw(test.labels, np.asarray(facts.facts["source_prior"]), 0, None, 2000)
    images = to_float(np.array(test.images[rows]))
    live = twoshift.recommended(source.model, facts)
    watch = Watch(live, facts)
    for _ in range(40):
        live.reset()
        watch.restart()
        for _ in range(15):
            watch(images[torch.from_numpy(rng.integers(len(images), size=64))])
        false += [sorted({alarm.kind for alarm in watch.alarms})] if watch.alarms else []
    assert len(false) / 40 <= ALPHA, false
