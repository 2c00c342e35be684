"""What a guard is worth: the published record, its page, and a small measurement."""

from __future__ import annotations

import json

import numpy as np
import pytest

from reproduction import guard
from tests.documents import ROOT

RECORD = json.loads((ROOT / guard.FILE).read_text())


def test_every_stream_was_measured_alone_and_guarded():
    streams = (guard.SPOILING, *guard.POISONS, *guard.HEALTHY)
    keys = {f"{m}/{c}/{s}" for m in guard.METHODS for c in guard.CORRUPTIONS for s in streams}
    assert set(RECORD["results"]) == keys
    for entry in RECORD["results"].values():
        assert len(entry["alone"]["accuracy"]) == len(entry["guarded"]["accuracy"])


def test_the_page_shows_it():
    page = (ROOT / "docs/watch.md").read_text()
    assert guard.insert(page, RECORD) == page


def test_means_are_means_over_corruptions():
    by_hand = [
        np.mean(RECORD["results"][f"TENT/{c}/black"]["alone"]["accuracy"][: guard.SOON])
        for c in guard.CORRUPTIONS
    ]
    found = guard.mean_of(RECORD, "TENT", "black", "alone", guard.SOON)
    assert found == pytest.approx(100 * np.mean(by_hand))


def test_healthy_streams_cost_little():
    for method in guard.METHODS:
        for name in guard.HEALTHY:
            alone, guarded = (
                guard.mean_of(RECORD, method, name, how, 10**6) for how in ("alone", "guarded")
            )
            assert alone - guarded < 0.5
