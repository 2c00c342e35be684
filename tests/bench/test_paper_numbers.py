"""The paper's numbers: all there, and as consistent as the paper is."""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.bench.test_table import OURS
from twoshift.bench.table import MEAN, table_names
from twoshift.bench.table import load_table as read_table

load_table = cache(read_table)
ROOT = Path(__file__).resolve().parents[2]
PAPER = Path(os.environ.get("TWOSHIFT_PAPER", ROOT.parent / "shared" / "paper"))
PRINTED = {
    "table1-cifar10": 11 * 8,
    "table1-cifar100": 11 * 8,
    "table2-imagenet": 11 * 8,
    "table3-visda": 9,
    "table4-officehome": 9 * 7,
    "table5-domainnet": 9 * 13,
    "table6-prior": 6 * 8,
    "table7-baselines": 6 * 8,
    "table8-cost": 4,
    "table10-parts": 7 * 8,
    "table11-source": 30 * 8,
    "table12-points": 4 * 8,
    "table13-delta-isfda": 3,
    "table14-sar": 6 * 8,
    "table15-cifar10-corruptions": 11 * 16,
    "table16-cifar100-corruptions": 11 * 16,
    "table17-imagenet-corruptions": 11 * 16,
}
# the line below a row "+Ours": what it gains over the row above it
GAINS = {
    ("table1-cifar10", "TENT"): "+0.03 +1.04 +2.06 +10.25 +9.21 +9.82 +10.00 +6.06",
    ("table1-cifar10", "IABN"): "+4.35 +3.78 +3.04 +1.12 +15.24 +19.20 +21.95 +9.81",
    ("table1-cifar100", "TENT"): "+0.69 +0.93 +2.02 +11.98 +5.37 +3.72 +3.87 +4.08",
    ("table1-cifar100", "IABN"): "+7.26 +6.47 +5.40 +2.83 +5.34 +5.67 +6.33 +5.62",
    ("table2-imagenet", "TENT"): "+5.12 +4.30 +3.59 +5.14 +2.01 +2.94 +3.99 +3.87",
    ("table2-imagenet", "IABN"): "+4.44 +3.47 +2.29 +0.52 +2.16 +3.71 +4.95 +3.08",
    ("table3-visda", "TENT"): "+24.29",
    ("table4-officehome", "TENT"): "0.00 +3.62 -1.15 +3.37 +0.10 +3.83 +1.63",
    ("table5-domainnet", "TENT"): "0.00 +4.01 +0.63 +0.69 +2.97 +2.91 0.00 +0.49 +2.15 -1.25 -1.08"
    " +3.94 +1.29",
}
# places where the paper disagrees with itself by more than rounding: none was found
WRONG_MEANS: set[tuple[str, str]] = set()
WRONG_GAINS: set[tuple[str, str, str]] = set()


def test_every_table_has_its_numbers():
    there = {name: len(load_table(name).paper) for name in table_names()}
    assert there == {**PRINTED, **dict.fromkeys(OURS, 0)}


@pytest.mark.parametrize("name", PRINTED)
def test_a_printed_row_is_whole(name):
    table = load_table(name)
    columns = {*table.columns} | ({MEAN} if len(table.columns) > 2 else set())
    for row in {row for row, _ in table.paper}:
        assert {c for r, c in table.paper if r == row} == columns


@pytest.mark.parametrize("name", PRINTED)
def test_printed_averages_are_those_of_their_rows(name):
    table, wrong = load_table(name), set()
    for (row, column), mean in table.paper.items():
        if column == MEAN:
            values = [table.paper[row, c] for c in table.columns]
            if abs(sum(values) / len(values) - mean) > 0.02:
                wrong.add((name, row))
    assert wrong == {place for place in WRONG_MEANS if place[0] == name}


def test_printed_gains_are_differences_of_rows():
    wrong = set()
    for (name, row), gains in GAINS.items():
        table = load_table(name)
        columns = [c for r, c in table.paper if r == row]
        for column, gain in zip(columns, gains.split(), strict=True):
            difference = table.paper[f"{row}+Ours", column] - table.paper[row, column]
            if abs(difference - float(gain)) > 0.02:
                wrong.add((name, row, column))
    assert wrong == WRONG_GAINS


def test_the_same_experiment_has_the_same_number():
    ours = {
        "table6-prior": "{}: estimate",
        "table7-baselines": "{}: Ours+IABN",
        "table14-sar": "{}: Ours+IABN",
    }
    for main, benchmark in (("table1-cifar10", "CIFAR-10-C"), ("table1-cifar100", "CIFAR-100-C")):
        first = {c: v for (r, c), v in load_table(main).paper.items() if r == "IABN+Ours"}
        assert len(first) == 8
        for name, row in ours.items():
            again = load_table(name).paper
            assert {c: v for (r, c), v in again.items() if r == row.format(benchmark)} == first


@pytest.mark.parametrize(
    ("by_labels", "by_corruption"),
    [
        ("table1-cifar10", "table15-cifar10-corruptions"),
        ("table1-cifar100", "table16-cifar100-corruptions"),
        ("table2-imagenet", "table17-imagenet-corruptions"),
    ],
)
def test_both_averages_over_corruptions_and_labels_agree(by_labels, by_corruption):
    first, second = load_table(by_labels).paper, load_table(by_corruption).paper
    rows = {row for row, _ in first}
    assert len(rows) == 11
    assert {r: first[r, MEAN] for r in rows} == {r: second[r, MEAN] for r in rows}


def test_nothing_of_the_paper_is_left_out():
    texts = sorted(PAPER.glob("*.txt"))
    if not texts:
        pytest.skip("the paper's text is not beside the repository")
    text = "".join(t.read_text() for t in texts)
    tables = re.findall(r"\\toprule(.*?)\\bottomrule", text, re.DOTALL)
    tables = [t for t in tables if "CosineAnneal" not in t]  # settings, not results
    assert len(tables) == len(PRINTED) - 1  # the two halves of Table 1
    # widths of columns have two decimals, too
    there = Counter(re.findall(r"[+-]?\b\d+\.\d\dM?(?!\d|\\textwidth)", "".join(tables)))
    kept = [value for name in PRINTED for value in load_table(name).printed.values()]
    assert there == Counter(kept) + Counter(" ".join(GAINS.values()).split())
    assert there.total() == sum(PRINTED.values()) + 69
