from __future__ import annotations

import json
import math
import os
import threading

import numpy as np
import pytest

from twoshift.errors import DataError, StorageError
from twoshift.watch import Alarm, AlarmLog, read_log
from twoshift.watch.alarms import FILE, KINDS, make_tests


def alarm(**changed):
    given = {"kind": "inputs", "message": "all is dark", "advice": "Look.", "since": 3}
    return Alarm(**{**given, "raised": 9, "sure": 0.97, **changed})


def test_an_alarm_says_it_all():
    assert str(alarm()) == "inputs: all is dark (since image 3, 97.0% sure at image 9). Look."
    assert "over at image 20" in str(alarm(ended=20))
    assert alarm().as_dict()["advice"] == "Look."


def test_it_is_raised_and_ends_and_can_be_raised_again():
    test = make_tests()["inputs"]
    assert test.suspicion == 0
    happened = []
    for i, x in enumerate([0.0] * 50 + [1.0] * 20 + [0.0] * 40 + [1.0] * 20):
        if test.add([x], 0.25, i, i + 1, "dark"):
            happened.append(test.alarm)
            assert test.on == (test.alarm.ended is None)
    first, over, second = happened
    assert 48 <= first.since <= 52
    assert first.sure >= 0.95
    assert over.raised == first.raised
    assert 70 < over.ended < 110
    assert second.since >= 108
    test.restart()
    assert not test.on


@pytest.mark.parametrize("size", [1, 16])
def test_all_kinds_together_are_rarely_false(size):
    """Every mean exactly at its bound: the worst healthy stream there is."""
    rng, false, streams = np.random.default_rng(size), 0, 150
    for _ in range(streams):
        tests = make_tests(0.05)
        for i in range(40):
            bounds = dict(zip(KINDS, (0.3, 0.9, 0.25, 0.75, 0.05), strict=True))
            for kind, m in bounds.items():
                tests[kind].add((rng.random(size) < m).astype(float), m, i, i + 1, "")
        false += any(test.alarm is not None for test in tests.values())
    assert false / streams <= 0.05


def test_evidence_is_shared_among_kinds():
    (level,) = {test._level for test in make_tests(0.05).values()}
    assert level == pytest.approx(math.log(len(KINDS) / 0.05))


def test_the_log_keeps_every_alarm_as_it_was_last(tmp_path):
    log = AlarmLog(tmp_path / "new" / "folder", "gate")
    log.add(alarm())
    log.add(alarm(kind="accuracy", since=5))
    log.add(alarm(ended=30))
    found, bad = read_log(tmp_path / "new" / "folder")
    assert bad == 0
    assert [(a["kind"], a["ended"], a["stream"]) for a in found] == [
        ("inputs", 30, "gate"),
        ("accuracy", None, "gate"),
    ]
    assert read_log(log.path) == (found, bad)


def test_a_line_that_was_cut_costs_only_itself(tmp_path):
    log = AlarmLog(tmp_path)
    log.add(alarm())
    with log.path.open("a") as file:
        file.write('{"kind": "inpu')
    log.add(alarm(since=7))
    with log.path.open("a") as file:
        file.write("[1]\n" + json.dumps({"kind": ["x"]}) + "\n")
    found, bad = read_log(tmp_path)
    assert [a["since"] for a in found] == [3, 7]
    assert bad == 3


def test_many_may_write_at_once(tmp_path):
    logs = [AlarmLog(tmp_path, str(i)) for i in range(8)]
    work = [
        threading.Thread(target=lambda g=log: [g.add(alarm(since=n)) for n in range(10)])
        for log in logs
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    found, bad = read_log(tmp_path)
    assert (len(found), bad) == (80, 0)


def test_a_log_that_is_not_there_or_cannot_be_written(tmp_path):
    with pytest.raises(DataError, match=f"{FILE} is missing"):
        read_log(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        AlarmLog(tmp_path / "file").add(alarm())
    assert os.listdir(tmp_path) == ["file"]
