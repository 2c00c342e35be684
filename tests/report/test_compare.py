from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.report.records import Paper, make, published
from twoshift.bench.result import Result
from twoshift.bench.table import load_table
from twoshift.report.compare import compare
from twoshift.report.tables import grid
from twoshift.report.terminal import rich_comparison

RESULTS = Path(__file__).resolve().parents[2] / "results"
F, U, B = "forward-50", "uniform", "backward-50"


def rows(results, table=None, **options):
    (found,) = compare([table or Paper()], results, **options)
    return {row.name: row.numbers for row in found.rows}


def streams(method, labels, *accuracies, **options):
    return [
        make(method, labels, accuracy, seed, **options) for seed, accuracy in enumerate(accuracies)
    ]


def test_a_number_is_a_mean_over_seeds_of_means_over_corruptions():
    results = streams("tent", U, 0.5, 0.7) + streams("tent", U, 0.3, 0.3, corruption="fog")
    number = rows(results)["tent"][U]
    assert number.entry.values == pytest.approx([0.4, 0.5])
    assert number.ours == pytest.approx(45)
    low, high = number.interval
    assert low == pytest.approx(45 - 12.706 * 5, abs=0.01)  # Student's t of one degree of freedom
    assert high == pytest.approx(45 + 12.706 * 5, abs=0.01)


def test_bold_needs_an_interval_of_paired_differences():
    near = streams("source", U, 0.30, 0.50, 0.70)
    # seeds differ by far more than methods do: only pairing shows who is better
    clear = rows(near + streams("tent", U, 0.32, 0.52, 0.72))
    assert clear["tent"][U].best
    assert not clear["source"][U].best
    unclear = rows(near + streams("tent", U, 0.32, 0.48, 0.73))
    assert not any(numbers[U].best for numbers in unclear.values())
    single = rows(near[:1] + streams("tent", U, 0.9))
    assert not single["tent"][U].best


def test_an_oracle_competes_with_nobody():
    results = streams("source", U, 0.3, 0.31) + streams("bn_stats", U, 0.4, 0.41)
    results += streams("tent", U, 0.9, 0.91, adapter="trained", estimator="oracle")
    (found,) = compare([Paper()], results)
    assert {row.name: row.oracle for row in found.rows}["tent"]
    assert {row.name: row.numbers[U].best for row in found.rows} == {
        "source": False,
        "tent": False,
        "bn_stats": True,
    }


def test_a_row_with_missing_streams_says_so_and_is_not_bold():
    results = streams("source", U, 0.3, 0.3) + streams("source", U, 0.3, 0.3, corruption="fog")
    results += streams("source", B, 0.3, 0.3)
    results += streams("tent", U, 0.9, 0.91)
    found = rows(results)
    assert (found["tent"][U].missing, found["tent"]["mean"].missing) == (2, 4)
    assert not found["tent"][U].best
    assert not found["tent"]["mean"].best
    assert found["source"][U].missing == 0


def test_the_mean_is_over_columns_seed_by_seed():
    found = rows(streams("tent", F, 0.6, 0.8) + streams("tent", B, 0.2, 0.2))
    assert found["tent"]["mean"].entry.values == pytest.approx([0.4, 0.5])


def test_columns_with_other_seeds_give_a_mean_without_an_interval():
    found = rows(streams("tent", F, 0.6, 0.8) + streams("tent", U, 0.1))
    assert found["tent"]["mean"].ours == pytest.approx(40)
    assert found["tent"]["mean"].interval is None


def test_the_papers_mean_is_over_the_same_columns_as_ours():
    numbers = {("tent", F): 80.0, ("tent", U): 50.0, ("tent", B): 20.0, ("tent", "mean"): 50.1}
    table = Paper(paper=numbers)
    some = rows(streams("tent", F, 0.7) + streams("tent", U, 0.5), table)["tent"]
    assert some["mean"].paper == pytest.approx(65)
    assert some[F].difference == pytest.approx(-10)
    every = rows([make("tent", labels) for labels in (F, U, B)], table)["tent"]
    assert every["mean"].paper == 50.1  # as printed


def test_the_worst_column():
    results = streams("tent", F, 0.6) + streams("tent", U, 0.5) + streams("tent", B, 0.2)
    (found,) = compare([Paper()], results)
    assert found.rows[0].worst == B


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"width": 16}, "width-16 network (paper: 64)"),
        ({"pixels": "made by hand"}, "generated corruptions (made by hand)"),
        ({"corruption": "contrast"}, "1 of 2 corruptions"),
    ],
)
def test_what_cannot_be_compared_is_told(change, says):
    paper = {"width": 64, "pixels": "published CIFAR-10-C"}
    table = Paper(columns=(U,), paper={("tent", U): 50.0})
    same = [make(corruption=name, **paper) for name in ("contrast", "fog")]
    assert compare([table], same)[0].notes == []
    other = [make(**{"corruption": name, **paper, **change}) for name in ("contrast", "fog")]
    assert compare([table], other)[0].notes == [says]


def test_columns_that_are_missing_are_told():
    table = Paper(paper={("tent", U): 50.0})
    assert "1 of 3 columns (means are over these)" in compare([table], [make()])[0].notes


@pytest.mark.parametrize(
    ("metrics", "options", "says"),
    [
        ({"accuracy_first10": 0.6, "accuracy_last10": 0.45}, {}, "falls by more than 10 points"),
        ({"medium_recall": 0.01, "tail_recall": 0.0}, {}, "medium and tail classes are hardly"),
        ({"s_error_final": 0.9}, {"adapter": "trained"}, "too far to the head"),
        ({"s_error_final": -0.9}, {"adapter": "trained"}, "too far to the tail"),
    ],
)
def test_breakdowns_raise_an_alarm(metrics, options, says):
    fine = make(seed=0, **options)
    (found,) = compare([Paper()], [fine, make(seed=1, metrics=metrics, **options)])
    (alarm,) = found.alarms
    assert says in alarm.what
    assert (alarm.row, alarm.column, alarm.streams, alarm.of) == ("tent", U, 1, 2)


def test_an_estimate_that_nothing_depends_on_raises_no_alarm():
    watched = {"metrics": {"s_error_final": 0.9}}
    results = [make(**watched), make(adapter="identity", labels=F, **watched)]
    assert compare([Paper()], results)[0].alarms == []


def test_parts_are_what_differs_within_a_column():
    results = [make(corruption=name, labels=y) for name in ("fog", "contrast") for y in (U, B)]
    (found,) = compare([Paper()], results)
    assert found.rows[0].parts == {"contrast": {U: 0.5, B: 0.5}, "fog": {U: 0.5, B: 0.5}}


def test_results_of_no_table_are_shown_by_data_set_or_left_out():
    results = [make("lame"), make("lame", corruption="clean")]
    found = compare([Paper()], results)
    assert [c.title for c in found] == ["cifar10, clean images", "cifar10, corrupted images"]
    assert compare([Paper()], results, rest=False) == []


def test_other_settings_of_a_method_are_a_row_of_their_own():
    results = [make(settings={"lr": lr}, accuracy=lr) for lr in (0.1, 0.2)]
    found = rows(results, Paper(rows=()))
    assert {name: n[U].ours for name, n in found.items()} == {
        "TENT": pytest.approx(10),
        "TENT, lr 0.2": pytest.approx(20),
    }


def test_a_result_may_be_of_several_tables():
    found = compare([Paper("one"), Paper("two")], [make()])
    assert [c.title for c in found] == ["one", "two"]


def test_published_numbers_stand_beside_the_papers():
    found = compare([load_table("table1-cifar10")], published())
    table = found[0]
    assert table.columns == [F, U, B]
    assert table.rows[0].name == "Source"
    numbers = {row.name: row.numbers for row in table.rows}
    known = [r for r in published() if r.cell.corruption != "clean"]
    expected = grid(known)["TENT + adapter"][B]
    assert numbers["TENT+Ours"][B].entry.values == pytest.approx(expected.values)
    assert numbers["TENT+Ours"][B].paper == 30.32
    assert {row.name for row in table.rows if row.oracle} == {
        "TENT+Ours (oracle)",
        "IABN+Ours (oracle)",
    }
    assert "4 of 15 corruptions" in table.notes
    assert "width-16 network (paper: 64)" in table.notes


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("table1-cifar10", "CIFAR-10-C, accuracy by label distribution (Table 1, CIFAR-10-C)"),
        ("pacs", load_table("pacs").title),  # of no table of the paper
    ],
)
def test_a_title_names_the_papers_table_where_there_is_one(name, title):
    lines = (RESULTS / f"{name}.jsonl").read_text().splitlines()
    records = [Result.from_json(json.loads(line)) for line in lines]
    shown, *_ = rich_comparison(load_table(name), records)
    assert shown.title == f"{title}; accuracy in %"
