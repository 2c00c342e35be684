from __future__ import annotations

import itertools

import pytest
from rich.console import Console

from twoshift.bench.cell import Cell
from twoshift.bench.result import Result, SourceFacts
from twoshift.metrics import Difference
from twoshift.report.columns import shift_name
from twoshift.report.tables import (
    Entry,
    differences,
    grid,
    markdown,
    markdown_differences,
    rich_differences,
    rich_table,
    row_name,
    verdict,
    with_mean,
)


def result(
    method="tent",
    labels="uniform",
    accuracy=0.5,
    seed=0,
    source_seed=0,
    adapter=None,
    estimator="ema",
    **metrics,
):
    cell = Cell(method, labels=labels, seed=seed, adapter=adapter, estimator=estimator)
    source = SourceFacts("toy", "toy_net", "bn", 16, "balanced_softmax", source_seed, "a" * 64)
    return Result("no key", cell, source, None, {"accuracy": accuracy, **metrics})


def entries(**values):
    return {name: Entry(tuple(v)) for name, v in values.items()}


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        ({"method": "source"}, "Source"),
        ({"method": "bn_stats"}, "BN stats"),
        ({"method": "my_method"}, "my_method"),
        ({"adapter": "trained"}, "TENT + adapter"),
        ({"method": "iabn", "adapter": "identity"}, "IABN + identity adapter"),
        ({"adapter": "trained", "estimator": "oracle"}, "TENT + adapter, oracle prior"),
        ({"adapter": "trained", "estimator": "fixed"}, "TENT + adapter, fixed"),
        ({"adapter": "logit", "estimator": "em"}, "TENT + logit adapter, em"),
        ({"estimator": "oracle"}, "TENT"),  # without an adapter nobody asks the estimator
    ],
)
def test_row_names(cell, name):
    assert row_name(result(**cell)) == name


def test_shift_names():
    names = {"forward-50": "F50", "uniform": "U", "backward-10": "B10", "permuted-50": "P50"}
    assert {labels: shift_name(labels) for labels in names} == names


def test_grid_averages_corruptions_then_seeds():
    # three corruptions under one seed, one under the other: a plain mean would give 0.45
    results = [
        result(accuracy=0.2, seed=0),
        result(accuracy=0.3, seed=0),
        result(accuracy=0.4, seed=0),
        result(accuracy=0.9, seed=1),
    ]
    entry = grid(results)["TENT"]["uniform"]
    assert entry.values == pytest.approx((0.3, 0.9))
    assert entry.mean == pytest.approx(0.6)


def test_a_seed_is_of_the_source_and_of_the_stream():
    results = [
        result(accuracy=0.1 * (2 * s + t), source_seed=s, seed=t)
        for t, s in itertools.product((1, 0), (1, 0))
    ]
    assert grid(results)["TENT"]["uniform"].values == pytest.approx((0, 0.1, 0.2, 0.3))


def test_grid_keeps_the_order_of_rows_and_sorts_columns():
    columns = ["backward-50", "uniform", "forward-10", "backward-10", "forward-50"]
    results = [result(m, labels) for m in ("tent", "source") for labels in columns]
    table = grid(results)
    assert list(table) == ["TENT", "Source"]
    expected = ["forward-50", "forward-10", "uniform", "backward-10", "backward-50"]
    assert all(list(cells) == expected for cells in table.values())


def test_grid_of_another_metric_and_other_rows():
    results = [result(seed=s, ece=0.25 * s) for s in (0, 1)]
    table = grid(results, "ece", row=lambda r: f"seed {r.cell.seed}")
    assert {name: cells["uniform"].values for name, cells in table.items()} == {
        "seed 0": (0.0,),
        "seed 1": (0.25,),
    }


# 97.5 % quantiles of Student's t, from a printed table
@pytest.mark.parametrize(
    ("values", "t"), [((0.1, 0.5), 12.706), ((0.2, 0.3, 0.7), 4.303), ((0.1, 0.2, 0.4, 0.9), 3.182)]
)
def test_the_interval_of_few_seeds_is_students(values, t):
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    reach = t * (variance / len(values)) ** 0.5
    assert Entry(values).interval == pytest.approx((mean - reach, mean + reach), abs=1e-3)


def test_a_single_seed_has_no_interval():
    assert Entry((0.5,)).interval is None
    assert str(Entry((0.1234,))) == "12.3"
    assert str(Entry((0.25, 0.75))) == "50.0 [-267.7, 367.7]"


def test_mean_column_is_taken_seed_by_seed():
    table = with_mean({"TENT": entries(uniform=(0.2, 0.4), forward=(0.6, 1.0))})
    assert list(table["TENT"]) == ["uniform", "forward", "mean"]
    assert table["TENT"]["mean"].values == pytest.approx((0.4, 0.7))


def test_columns_with_different_seeds_have_a_mean_without_an_interval():
    table = with_mean({"TENT": entries(uniform=(0.2, 0.4), forward=(0.6,))})
    assert table["TENT"]["mean"].values == pytest.approx((0.45,))


def test_differences_are_paired():
    # seeds differ a lot, methods by one point: only a paired interval sees it
    b = (0.1, 0.5, 0.9)
    a = tuple(v + 0.01 for v in b)
    rows = differences({"A": entries(uniform=a), "B": entries(uniform=b)}, [("A", "B")])
    (difference,) = rows["A against B"].values()
    assert difference == pytest.approx((0.01, 0.01, 0.01))
    assert verdict(difference) == "better"


def test_differences_leave_out_rows_that_are_not_there():
    table = {"A": entries(uniform=(0.1, 0.2)), "B": entries(uniform=(0.1, 0.2))}
    assert list(differences(table, [("A", "C"), ("C", "A"), ("B", "A")])) == ["B against A"]


def test_a_single_seed_has_a_difference_but_no_interval():
    table = {"A": entries(uniform=(0.3,)), "B": entries(uniform=(0.1,))}
    rows = differences(table, [("A", "B")])
    assert rows["A against B"]["uniform"].mean == pytest.approx(0.2)
    assert verdict(rows["A against B"]["uniform"]) == "no clear difference"
    assert markdown_differences(rows) == "| | U |\n|---|---:|\n| A against B | +20.0 |\n"


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.01, 0.2, "better"),
        (-0.2, -0.01, "worse"),
        (-0.1, 0.2, "no clear difference"),
        (0.0, 0.2, "no clear difference"),
        (-0.2, 0.0, "no clear difference"),
    ],
)
def test_verdicts(low, high, said):
    assert verdict(Difference((low + high) / 2, low, high)) == said


TABLE = {
    "TENT": {"forward-50": Entry((0.5, 0.6)), "uniform": Entry((0.4, 0.4))},
    "TENT + adapter": {"forward-50": Entry((0.7, 0.8)), "uniform": Entry((0.3, 0.3))},
    "TENT + adapter, oracle prior": {
        "forward-50": Entry((0.9, 0.9)),
        "uniform": Entry((0.9, 0.9)),
    },
}


def test_markdown():
    assert markdown(with_mean(TABLE)) == (
        "| | F50 | U | mean |\n"
        "|---|---:|---:|---:|\n"
        "| TENT | 55.0 [-8.5, 118.5] | 40.0 [40.0, 40.0] | 47.5 [15.7, 79.3] |\n"
        "| TENT + adapter | 75.0 [11.5, 138.5] | 30.0 [30.0, 30.0] | 52.5 [20.7, 84.3] |\n"
        "| TENT + adapter, oracle prior | 90.0 [90.0, 90.0] | 90.0 [90.0, 90.0] "
        "| 90.0 [90.0, 90.0] |\n"
    )


def test_markdown_of_other_units():
    table = {"TENT": {"uniform": Entry((0.25, 0.75))}}
    assert markdown(table, scale=1, digits=2).splitlines()[-1] == "| TENT | 0.50 [-2.68, 3.68] |"


def test_markdown_differences():
    rows = differences(TABLE, [("TENT + adapter", "TENT")])
    assert markdown_differences(rows) == (
        "| | F50 | U |\n"
        "|---|---:|---:|\n"
        "| TENT + adapter against TENT | +20.0 [+20.0, +20.0] | -10.0 [-10.0, -10.0] |\n"
    )


def drawn(table) -> list[str]:
    console = Console(width=200, force_terminal=True, color_system="standard", no_color=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


def test_the_best_that_is_no_oracle_is_bold():
    tent, adapter, oracle = drawn(rich_table(TABLE, "Accuracy"))[-len(TABLE) :]
    bold = "\x1b[1m"
    assert f"{bold}40.0 [40.0, 40.0]" in tent
    assert f"{bold}75.0 [11.5, 138.5]" in adapter
    assert tent.count(bold) == adapter.count(bold) == 1
    assert bold not in oracle


def test_terminal_shows_whole_intervals():
    # square brackets are markup there and vanish if not escaped
    text = "\n".join(drawn(rich_table(TABLE, "Accuracy")))
    assert "55.0 [-8.5, 118.5]" in text
    rows = differences(TABLE, [("TENT + adapter", "TENT")])
    text = "\n".join(drawn(rich_differences(rows, "Differences")))
    assert "\x1b[32m+20.0 [+20.0, +20.0]" in text  # green
    assert "\x1b[31m-10.0 [-10.0, -10.0]" in text  # red
