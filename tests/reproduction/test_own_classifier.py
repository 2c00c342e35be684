"""Classifiers of one's own gain by the lines of the README, or are left alone."""

import json

import numpy as np
import pytest

from reproduction import own_classifier
from tests.documents import ROOT

RECORD = json.loads((ROOT / own_classifier.FILE).read_text())


def changes(record, loss, calibrated_on):
    """Points by which accuracy changes on every stream."""
    results = record["results"][loss]
    before, after = (results[name]["accuracy"] for name in ("source", calibrated_on))
    return 100 * np.array([after[stream] - before[stream] for stream in before])


def check(record):
    """What is promised of both classifiers."""
    for loss in own_classifier.LOSSES:
        assert len(changes(record, loss, "source")) == 9
        assert changes(record, loss, "new images").mean() > 2
        assert "Streamed" in record["results"][loss]["new images"]["describe"]
        assert not record["results"][loss]["new images"]["warnings"]
        assert changes(record, loss, "training images").min() >= -1
        assert "held_out=" in record["results"][loss]["training images"]["warnings"][0]


def test_what_is_published_keeps_the_promise():
    check(RECORD)


def test_the_page_shows_it():
    page = (ROOT / "docs/own-data.md").read_text()
    assert own_classifier.insert(page, RECORD) == page
    mean = 100 * np.mean([*RECORD["results"]["cross_entropy"]["new images"]["accuracy"].values()])
    assert f"| {mean:.1f} |" in page


@pytest.mark.slow
def test_both_classifiers_gain_or_are_left_alone(shared_data):
    check(own_classifier.measure_all(shared_data, epochs=8))
