from __future__ import annotations

import numpy as np
import pytest

from twoshift.errors import BatchError, SettingError
from twoshift.watch.history import History


def filled(rows, recent=4):
    history = History(["images", "value"], recent=recent)
    for i in range(rows):
        history.add({"images": 10 * (i + 1), "value": float(i), "unknown": 3.0})
    return history


def test_few_rows_are_kept_as_they_are():
    history = filled(4)
    assert list(history)[1] == {"images": 20, "value": 1}
    assert history.column("value").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("rows", [5, 9, 20, 1000])
def test_memory_is_bounded_and_recent_rows_are_whole(rows):
    history = filled(rows)
    assert len(history) <= 4 + 5 + 1
    assert history.column("value")[-4:].tolist() == list(range(rows - 4, rows))
    assert (np.diff(history.column("images")) > 0).all()


@pytest.mark.parametrize("rows", [12, 37, 1000])
def test_an_older_row_is_the_mean_of_the_batches_up_to_the_next(rows):
    """Written out: every batch is in one row, the one whose number of images it leads up to."""
    table, first = filled(rows).table(), 0
    for images, value in table:
        last = int(images) // 10
        assert value == pytest.approx(np.arange(first, last).mean())
        first = last
    assert first == rows


def test_what_is_not_known_counts_in_no_mean():
    history = History(["images", "value"], recent=1)
    for i, value in enumerate([1.0, None, None, None, None, None]):
        history.add({"images": i, "value": value})
    assert next(iter(history))["value"] == 1.0
    assert list(history)[-1]["value"] is None


def test_a_state_goes_on():
    first, second = filled(37), filled(0)
    second.load(first.state())
    for history in (first, second):
        for i in range(37, 50):
            history.add({"images": 10 * (i + 1), "value": float(i)})
    assert np.array_equal(first.table(), second.table())
    assert np.array_equal(first.table(), filled(50).table())
    first.clear()
    assert len(first) == 0
    assert first.table().shape == (0, 2)


def test_wrong_ones_are_refused():
    with pytest.raises(SettingError, match="recent of history"):
        History(["images"], recent=0)
    with pytest.raises(BatchError, match="with 'images'"):
        History(["value"])
    with pytest.raises(BatchError, match="rows of"):
        History(["images"]).load(filled(3).state())
    with pytest.raises(BatchError, match="rows of"):
        History(["images", "value"], recent=2).load(filled(9).state())
