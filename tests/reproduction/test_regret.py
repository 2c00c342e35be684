"""The section that asks whether doing nothing would have been better."""

import re

import numpy as np
import pytest
from scipy import stats

from reproduction import regret
from tests.reproduction.test_pages import published, record
from twoshift.bench.table import load_table

TABLE = load_table("streams-cifar10")
FOUR = 4
NOISE = np.array([-0.3, 0.1, 0.0, 0.2])  # of the corruptions


def made_up(column, **points):
    """Records of a column in which rows differ by points, and corruptions by noise."""
    records = []
    for name, row in {"Source": 50.0, "BN Stats": 40.0, "Recommended": 50.0, **points}.items():
        cells = TABLE.cells("cpu", 1, {"row": [name], "column": [column]})
        noise = NOISE if name == "Recommended" else 0 * NOISE
        records += [record(c, (row + n) / 100) for c, n in zip(cells, noise, strict=True)]
    return records


@pytest.mark.parametrize(
    ("ours", "says"), [(48.0, "**regret**"), (48.9, "open"), (49.8, "none"), (60.0, "none")]
)
def test_a_regret_is_an_interval_wholly_below_the_margin(ours, says):
    (column,) = regret.columns(made_up("bursts-0.1", Recommended=ours))
    differences = ours - 50 + NOISE
    half = stats.t.ppf(0.975, FOUR - 1) * differences.std(ddof=1) / np.sqrt(FOUR)
    assert column.difference == pytest.approx(ours - 50)
    assert column.interval == pytest.approx((ours - 50 - half, ours - 50 + half))
    assert column.verdict == says


def test_the_better_of_source_and_batch_statistics_is_the_rival():
    records = made_up("bursts-0.1", **{"BN Stats": 55.0})
    (column,) = regret.columns(records)
    assert (column.rival, round(column.difference)) == ("BN Stats", -5)


def test_batch_statistics_of_single_images_are_no_rival():
    (column,) = regret.columns(made_up("F50 by 1", **{"BN Stats": 55.0}))
    assert column.rival == "Source"


def test_the_worst_streams_come_first_and_are_ten():
    records = made_up("bursts-0.1") + made_up("sorted", Recommended=47) + made_up("markov-0.9")
    text = regret.section(records)
    worst = text.partition("worst single streams")[2].splitlines()[4:]
    shown = [float(line.split("|")[-2]) for line in worst if line]
    differences = [*NOISE, *NOISE, *(NOISE - 3)]
    assert shown == pytest.approx(sorted(differences)[: regret.WORST], abs=0.051)
    assert "3 columns: regret in 1, open 0, none in 2." in text


def test_streams_that_tables_share_are_shown_once():
    places = [column.place for column in regret.columns(published())]
    assert len(places) == len(set(places))


def test_without_records_nothing_is_said():
    assert regret.section([]) == "Not measured.\n"


def test_the_published_columns_computed_slowly():
    """Mean accuracies and differences of one network, from raw cells by plain loops."""
    accuracies = {}
    for r in published():
        if place := TABLE.place(r):
            accuracies.setdefault((place.row, place.column), {})[r.cell.corruption] = r.accuracy
    lines = regret.section(published()).splitlines()
    checked = 0
    for column in TABLE.columns:
        ours = accuracies.get(("Recommended", column))
        if not ours or column not in ("bursts-0.1", "sorted", "switch-50"):
            continue
        (line,) = [x for x in lines if re.match(rf"\| {re.escape(column)} \| \d", x)]
        rivals = [accuracies[row, column] for row in ("Source", "BN Stats")]
        worst = min(100 * np.mean([ours[c] - rival[c] for c in ours]) for rival in rivals)
        assert f"| {100 * np.mean(list(ours.values())):.1f} | {worst:+.1f} [" in line
        checked += 1
    assert checked == 3
