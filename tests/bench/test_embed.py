from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bench.test_cell import CLASSES, make_images, make_source
from twoshift.adapters import load_adapter
from twoshift.bench import Cell
from twoshift.bench.embed import stream_features, tsne
from twoshift.data import load
from twoshift.data.stream import Stream
from twoshift.errors import InputError, MissingExtra
from twoshift.models.head import features
from twoshift.train.checkpoint import load_source

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"


def test_features_are_what_the_head_saw_when_it_predicted():
    source, images = make_source(), make_images()
    seen = stream_features(Cell("source", batch_size=16, seed=5), source, None, images)
    x = torch.cat([b.x for b in Stream(images, np.full(CLASSES, 0.25), batch_size=16, seed=5)])
    with torch.no_grad():
        assert seen.features == pytest.approx(features(source.model, x).numpy(), abs=1e-6)
        assert seen.predicted.tolist() == source.model(x).argmax(1).tolist()
    assert sorted(seen.labels) == sorted(images.labels)


def test_natural_labels_and_the_order_of_a_cell_are_respected():
    source, images = make_source(), make_images()
    few = images.subset(np.flatnonzero(images.labels != 3)[:50])
    cell = Cell("source", labels="natural", order="correlated", batch_size=16)
    expected = Stream(few, None, batch_size=16, order="correlated").labels
    assert stream_features(cell, source, None, few).labels.tolist() == expected.tolist()


def test_adapting_moves_the_features():
    source, images = make_source(), make_images()
    cells = [Cell("tent", {"lr": lr}, batch_size=16) for lr in (1e-9, 0.1)]
    still, moved = (stream_features(cell, source, None, images).features for cell in cells)
    assert still[:16] == pytest.approx(moved[:16], abs=1e-5)  # scored before the first step
    assert np.abs(still[16:] - moved[16:]).max() > 0.01


def test_the_features_of_real_models(shared_data):
    images = load("cifar10", "test", shared_data).subset(np.arange(200))
    source = load_source(CHECKPOINTS / "cifar10-iabn")
    adapter = load_adapter(CHECKPOINTS / "cifar10-iabn-adapter")
    cell = Cell("iabn", {"lr": 1e-9, "momentum": 0.0}, adapter="trained")
    seen = stream_features(cell, source, adapter, images)
    assert seen.features.shape == (len(seen.labels), adapter.features)
    assert (seen.predicted == seen.labels).mean() > 0.6
    # nothing moves at this rate: they are the plain features of the source model
    stream = Stream(images, np.full(10, 0.1), batch_size=64)
    with torch.no_grad():
        expected = torch.cat([features(source.model, batch.x) for batch in stream])
    assert seen.features == pytest.approx(expected.numpy(), abs=1e-3)


def test_without_the_package_the_cure_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "openTSNE", None)
    with pytest.raises(MissingExtra, match=r"pip install 'twoshift\[tsne\]'"):
        tsne(np.zeros((200, 3)))


def test_too_few_images_for_a_map():
    with pytest.raises(InputError, match="more than 90, got 5"):
        tsne(np.zeros((5, 3)))


def test_a_map_keeps_neighbours_together_and_repeats():
    pytest.importorskip("openTSNE", reason="pip install 'twoshift[tsne]'")
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], 60)
    points = rng.normal(size=(120, 5)) + 10 * labels[:, None]
    places = tsne(points, seed=1)
    assert np.array_equal(places, tsne(points, seed=1))
    distances = np.linalg.norm(places[:, None] - places[None], axis=-1) + 1e9 * np.eye(120)
    assert (labels[distances.argmin(1)] == labels).all()
