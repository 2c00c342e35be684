"""A short run of the fuzz suite; `make fuzz` is the long one, and kills are tested with storage."""

import json

import pytest

from benchmarks.reliability import CASES
from benchmarks.reliability_report import UNITS, page
from tests.fuzz import workers


def test_what_must_not_happen_is_noticed():
    report = workers.run("sick", 7, 0, patience=2.0)
    assert report.counts == {"cases": 3, "problems": 2, "crashes": 1, "hangs": 1}
    raised, crashed, hung, ate = report.problems
    assert "workers sick 1 2 0: " in raised
    assert "ZeroDivisionError" in raised
    assert "workers sick 2 3 0: ended the process with -11" in crashed
    assert "workers sick 4 5 0: took more than 2 s" in hung
    assert "MemoryError" in ate


@pytest.mark.parametrize(
    ("part", "cases"),
    [("batches", 5), ("machine", 1), ("tampered", 40), ("files", 70), ("threads", 1)],
)
def test_a_short_run(part, cases):
    report = workers.in_process(part, cases, seed=1)
    assert not report.problems
    assert report.counts[UNITS[part][1]] >= cases


def test_full_disks():
    """In a process of its own: limits and mounted disks are not for that of the tests."""
    report = workers.run("full_disk", 6, seed=1)
    assert not report.problems
    assert report.counts["saves"] == 6


def test_the_page_shows_every_part_and_what_went_wrong():
    settings = {"versions": {"torch": "2", "python": "3"}, "revision": "abc", "machine": "x"}
    settings |= {"cores": 2, "seed": 0}
    part = {"counts": {"files": 7, "BatchError": 5, "taken": 2}, "problems": [], "seconds": 60}
    measured = {"settings": settings, "parts": dict.fromkeys(("kills", *CASES), part)}
    text = " ".join(page(json.loads(json.dumps(measured))).split())
    assert "Nothing but a `TwoshiftError`" in text
    assert "| tampered folders | 7 | 5 refused, 2 loaded |" in text
    assert all(what in text for what, _ in UNITS.values())
    bad = {**part, "counts": {**part["counts"], "crashes": 1}, "problems": ["it crashed"]}
    measured["parts"]["tampered"] = bad
    text = page(measured)
    assert "**1 crashes**" in text
    assert "    it crashed" in text
    assert "Nothing but" not in text
