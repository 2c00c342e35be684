"""Tables of one's own, what may be wrong in their files, and the table of counts."""

from __future__ import annotations

import pytest
import torch

from twoshift.bench.table import load_table
from twoshift.errors import SettingError, TwoshiftError, UnknownName

MINE = """
title: Mine
benchmark: digits
benchmarks:
  digits:
    corruptions: [clean, contrast]
    labels: [uniform, permuted-10]
    batch_size: 16
    profiles:
      cpu: {source_recipe: {recipe: demo}, adapter_recipe: {recipe: demo}, seeds: 2}
rows:
  - {name: Source, method: source}
  - {name: TENT, method: tent, settings: {lr: 0.01}}
"""


def write(tmp_path, text=MINE, numbers=None):
    (tmp_path / "mine.yaml").write_text(text)
    if numbers is not None:
        (tmp_path / "mine.csv").write_text(numbers)
    return tmp_path / "mine.yaml"


def test_a_table_of_ones_own(tmp_path):
    table = load_table(write(tmp_path, numbers="row,column,value\nTENT,uniform,50.5\n"))
    assert (table.name, table.title, table.profiles) == ("mine", "Mine", ("cpu",))
    assert table.paper == {("TENT", "uniform"): 50.5}
    assert table.printed == {("TENT", "uniform"): "50.5"}
    cells = table.cells()
    assert len(cells) == 2 * 2 * 2 * 2
    tent = [c for c in cells if c.method == "tent"]
    assert {(c.settings["lr"], c.batch_size) for c in tent} == {(0.01, 16)}
    assert cells[0].model.source["dataset"] == "mnist5k"


def test_without_numbers(tmp_path):
    assert load_table(str(write(tmp_path))).paper == {}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title: Mine", "titel: Mine", "'titel' .* Did you mean 'title'"),
        ("title: Mine", "", "setting 'title' of table .*mine.yaml: Field required$"),
        ("title: Mine", "title: Mine\ncolums: labels", "'colums' .* Did you mean 'columns'"),
        ("method: source", "method: source, adaptor: trained", "Did you mean 'adapter'"),
        ("batch_size: 16", "batch: 16", "Did you mean 'batch_size'"),
        ("seeds: 2", "seed: 2", "'benchmarks.digits.profiles.cpu.seed' .* Did you mean 'seeds'"),
        ("method: source", "method: sorce", "Did you mean 'source'"),
        ("{lr: 0.01}", "{lrr: 0.01}", "method 'tent' has no setting 'lrr'. Did you mean 'lr'"),
        ("method: source", "method: source, estimator: emma", "Did you mean 'ema'"),
        ("method: source", "method: source, norm: ln", "rows.0.norm"),
        ("benchmark: digits", "benchmark: digit", "unknown benchmark 'digit'.*'digits'"),
        ("benchmark: digits", "columns: labels", "one of benchmark, groups and counts"),
        ("title: Mine", "title: Mine\ncolumns: domains", "domains must be given"),
        ("contrast", "contrst", "Did you mean 'contrast'"),
        ("permuted-10", "permuted", "unknown label distribution"),
        ("recipe: demo}, a", "recipe: dem}, a", "unknown recipe 'dem'"),
        ("recipe: demo}, a", "epoch: 3}, a", "setting 'epoch' of a recipe.* 'epochs'"),
        ("recipe: demo}, a", "recipe: demo, settings: {widht: 3}}, a", "Did you mean 'width'"),
        ("name: TENT", "name: Source", "two rows of .* are called 'Source'"),
        ("method: tent, settings: {lr: 0.01}", "method: source", "'Source' and 'TENT' .* same"),
        ("title: Mine", "title: [", "is not YAML"),
        (MINE, "", "Input should be a valid dictionary"),
    ],
)
def test_what_is_wrong_in_a_file(tmp_path, old, new, message):
    assert old in MINE
    with pytest.raises(TwoshiftError, match=message):
        load_table(write(tmp_path, MINE.replace(old, new)))


def test_a_trained_adapter_is_checked(tmp_path):
    text = MINE.replace(
        "settings: {lr: 0.01}", "adapter: trained, adapter_recipe: {adapter: {dW: none}}"
    )
    with pytest.raises(SettingError, match="the adapter has no setting 'dW'"):
        load_table(write(tmp_path, text))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ("row,column,value\nTENd,uniform,1\n", "'TENd', 'uniform': not in the table"),
        ("row,column,value\nTENT,contrast,1\n", "not in the table"),
        ("row,column,value\nTENT,uniform,x\n", "must be row,column,value"),
        ("row,column,value\nTENT,uniform\n", "must be row,column,value"),
        ("row,column\nTENT,uniform\n", "must be row,column,value"),
        ("row,column,value\nTENT,uniform,1\nTENT,uniform,2\n", "two numbers"),
    ],
)
def test_what_is_wrong_in_the_numbers(tmp_path, numbers, message):
    with pytest.raises(SettingError, match=message):
        load_table(write(tmp_path, numbers=numbers))


def test_unknown_tables(tmp_path):
    with pytest.raises(UnknownName, match="Did you mean 'table1-cifar10'"):
        load_table("table1-cifar")
    with pytest.raises(UnknownName, match="unknown table"):
        load_table(tmp_path / "none.yaml")


def test_costs_are_counted():
    table = load_table("table8-cost")
    before = torch.get_rng_state()
    counted = table.counts()
    assert torch.equal(torch.get_rng_state(), before)
    assert (table.kind, table.by, table.columns) == ("counts", "counts", ("MACs", "Params"))
    assert table.cells() == []
    assert set(table.paper) <= set(counted)
    assert table.paper["ResNet-18", "MACs"] == pytest.approx(557.93e6)
    for row in ("ResNet-18", "+ Ours"):
        assert round(counted[row, "Params"] / 1e6, 2) == table.paper[row, "Params"] / 1e6
        # the paper's tool counts normalisation layers, too
        assert counted[row, "MACs"] == pytest.approx(table.paper[row, "MACs"], rel=0.005)
    added = counted["+ Ours", "MACs"] - counted["ResNet-18", "MACs"]
    assert 0.11e6 < added < 0.125e6
    with pytest.raises(SettingError, match="counted, not measured"):
        load_table("table3-visda").counts()
