"""The page that compares what is recommended with its rivals."""

import json
from pathlib import Path

import numpy as np
import pytest

from reproduction import claims, rivals
from tests.reproduction.test_pages import published, record
from twoshift.bench.table import load_table

TABLE = load_table("streams-cifar10")
SPEED = json.loads(Path("results/speed.json").read_text())


def made_up(column, **points):
    """Records of a column in which rows differ by points."""
    return [
        record(cell, row / 100)
        for name, row in points.items()
        for cell in TABLE.cells("cpu", 1, {"row": [name], "column": [column]})
    ]


def test_a_rival_that_is_ahead_is_in_bold_and_listed():
    records = made_up("bursts-0.1", Recommended=60.0, LAME=62.5, NOTE=50.0)
    text = rivals.page(records, SPEED)
    assert "| LAME | **-2.5 [-2.5, -2.5]** ¹ |" in text
    assert "| NOTE | +10.0 [+10.0, +10.0] ¹ |" in text
    assert "clearly ahead in 1 and clearly behind in 1" in " ".join(text.split())
    behind = text.partition("## Where a rival is ahead")[2].partition("## Cost")[0]
    assert "| bursts-0.1 | LAME |" in behind
    assert "4 of 4" in behind
    assert "NOTE" not in behind


def test_without_records_nothing_is_claimed():
    text = rivals.page([], SPEED)
    assert "Of 0 comparisons" in text
    assert text.count("Not measured.") == 4


def test_rivals_are_rows_and_their_costs_are_measured():
    assert set(rivals.RIVALS) <= set(TABLE.rows)
    assert set(rivals.COLUMNS) | set(rivals.SMALL) <= set(TABLE.columns)
    assert set(rivals.costs(SPEED)) == {*rivals.PLAIN, *rivals.RIVALS, rivals.OURS}


def test_the_published_differences_computed_slowly():
    """From raw cells by plain loops."""
    accuracies = {}
    for r in published():
        if place := TABLE.place(r):
            accuracies.setdefault((place.row, place.column), {})[r.cell.corruption] = r.accuracy
    for place in rivals.places(published(), rivals.COLUMNS):
        for rival, finding in rivals.findings(place).items():
            ours, theirs = (accuracies[row, *place.columns] for row in (rivals.OURS, rival))
            each = [100 * (ours[c] - theirs[c]) for c in theirs]
            assert finding.ours == pytest.approx(np.mean(each))
            assert (finding.verdict == claims.FAILS) == (finding.interval[1] < 0)


def test_the_cost_is_drawn_for_every_row_of_the_table():
    found = rivals.points(published(), SPEED)
    (ax,) = rivals.figure(published(), SPEED).axes
    assert {text.get_text() for text in ax.texts} == set(found)
    assert rivals.OURS in found
    assert found["Source"][0] == pytest.approx(SPEED["methods"]["source"]["ratio"])


def test_what_the_adapter_adds():
    records = made_up("uniform", Recommended=60.0, ROID=40.0, **{"ROID+Ours": 41.5})
    text = rivals.page(records, SPEED)
    section = text.partition("## With the adapter")[2].partition("## Cost")[0]
    assert "| ROID | +1.5 [+1.5, +1.5] |" in section
    assert "TRIBE" not in section.partition("|")[2]


def test_labels_of_near_points_stand_apart():
    assert rivals.label_places([(50.0, 50.0)], [30.0]) == [(5, 2)]
    assert rivals.label_places([(50.0, 50.0), (60.0, 50.0)], [30.0, 30.0]) == [(-5, 2), (5, 2)]
    crowd = [(50.0, 50.0), (50.0, 54.0)]
    assert len(set(rivals.label_places(crowd, [30.0, 30.0]))) == 2
