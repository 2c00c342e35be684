"""Streams of cells: orders, schedules, corruptions one after another, and tables of them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from tests.bench.stored import make_result as stored_result
from tests.bench.test_cell import CLASSES, COUNTS, make_images, make_source
from tests.bench.test_cost import SOURCE as DEMO_CELL
from tests.bench.test_workshop import CELL
from tests.report.records import make
from twoshift.bench import Cell, cost, run_cell
from twoshift.bench.cell import cell_from
from twoshift.bench.export import flat
from twoshift.bench.figure_file import Desk
from twoshift.bench.images import ImageCache
from twoshift.bench.measure import stream_of
from twoshift.bench.record import read_record
from twoshift.bench.request import make_cell
from twoshift.bench.store import Store
from twoshift.bench.table import Place, load_table
from twoshift.bench.track import title
from twoshift.bench.workshop import Workshop
from twoshift.data import load
from twoshift.data.schedules import named
from twoshift.data.stream import Stream
from twoshift.errors import InputError, PriorError, SettingError, TwoshiftError, UnknownName
from twoshift.report import figures
from twoshift.report.compare import compare
from twoshift.report.page import Facts, render
from twoshift.report.terminal import rich_comparison
from twoshift.report.text import to_csv, to_latex, to_markdown
from twoshift.train.recipes import SourceRecipe, load_recipe

# -- cells ------------------------------------------------------------------------------------

IMAGES = make_images()


@pytest.mark.parametrize(
    "change",
    [
        {"order": "bursts-0.1"},
        {"order": "markov-0.9"},
        {"labels": "drift-10"},
        {"labels": "switch-10"},
        {"corruption": "fog+clean"},
        {"corruption": "clean+fog"},
        {"images": 50},
    ],
)
def test_what_makes_another_stream_makes_another_key(change):
    assert replace(CELL, **change).key != CELL.key


def test_a_cell_says_how_its_images_arrive():
    assert Cell("tent").arrival == ""
    cell = Cell("tent", order="bursts-1", batch_size=1, images=300)
    assert cell.arrival == "bursts-1, at most 300 images, batches of 1"
    assert Cell("tent", corruption="fog+clean").corruptions == ("fog", "clean")
    result = stored_result()
    changed = replace(result, cell=replace(result.cell, order="sorted"))
    assert title(changed) == "tent contrast-5 uniform sorted seed0"


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"corruption": "fog+contrst"}, UnknownName, "'contrst'. Did you mean 'contrast'"),
        ({"corruption": "fog+"}, UnknownName, "unknown corruption ''"),
        ({"labels": "drfit-50"}, PriorError, "Did you mean 'drift-50'"),
        ({"order": "bursts"}, SettingError, "Did you mean 'bursts-0.1'"),
        ({"images": 0}, SettingError, "images of the stream, must be a whole number from 1"),
        ({"images": 2.5}, SettingError, "a whole number"),
    ],
)
def test_streams_that_do_not_exist_are_refused(fields, error, says):
    with pytest.raises(error, match=says):
        make_cell(**fields)


@pytest.mark.parametrize("labels", ["drift-5", "switch-5"])
def test_a_schedule_follows_the_counts_of_the_source_and_an_oracle_is_told_its_mean(labels):
    source = make_source()
    cell = Cell("source", adapter="logit", estimator="oracle", labels=labels, batch_size=10)
    stream = stream_of(cell, IMAGES, COUNTS)
    expected = Stream(IMAGES, named(labels, CLASSES, order=[0, 1, 2, 3]), batch_size=10)
    assert np.array_equal(stream.indices, expected.indices)
    result = run_cell(cell, source, images=IMAGES)
    assert result.trace["true_prior"] == stream.prior.tolist()
    assert result.metrics["prior_l1"] == pytest.approx(0, abs=1e-6)


def test_order_and_number_of_images_reach_the_stream():
    cell = Cell("source", order="sorted", images=40, batch_size=1, seed=2)
    stream = stream_of(cell, IMAGES, COUNTS)
    assert (len(stream), len(stream.indices)) == (40, 40)
    assert (np.diff(stream.labels) != 0).sum() == CLASSES - 1
    assert run_cell(cell, make_source(), images=IMAGES).metrics["batches"] == 40


def test_a_cell_needs_as_many_image_sets_as_corruptions():
    cell = Cell("source", corruption="fog+clean")
    assert len(stream_of(cell, [IMAGES, IMAGES], COUNTS).cuts) == 3
    for images in (IMAGES, [IMAGES], [IMAGES] * 3):
        with pytest.raises(SettingError, match="image sets of a cell, must be 2, one per corr"):
            stream_of(cell, images, COUNTS)


def digits_source():
    """A small untrained network for real digits."""
    digits, source = load("digits8x8", "test"), make_source()
    source.model[-1] = nn.Linear(8, 10)
    facts = {"dataset": "digits8x8", "classes": list(digits.classes)}
    card = replace(source.card, **facts, class_counts=[*range(100, 0, -10)])
    return replace(source, card=card)


def test_joined_corruptions_are_those_of_the_single_ones(tmp_path):
    names = ("contrast", "clean", "fog", "snow", "pixelate", "contrast")  # more than are kept
    cell = Cell("source", corruption="+".join(names), batch_size=50)
    source, cache = digits_source(), ImageCache(tmp_path)
    sets = cache.of(cell, source)
    assert cache.of(cell, source) is sets
    assert isinstance(sets[0].images, np.memmap)  # a file, not memory
    counts = source.card.class_counts
    stream = stream_of(cell, sets, counts)
    joined = torch.cat([batch.x for batch in stream])
    for i, name in enumerate(names):
        one = replace(cell, corruption=name)
        single = stream_of(one, ImageCache(tmp_path).of(one, source), counts)
        assert np.array_equal(single.indices, stream.indices)
        part = slice(stream.cuts[i], stream.cuts[i + 1])
        assert torch.equal(joined[part], torch.cat([batch.x for batch in single])[part])


def test_a_result_of_joined_corruptions(tmp_path):
    cell = Cell("bn_stats", corruption="contrast+clean", order="bursts-0.1", labels="drift-5")
    result = run_cell(cell, digits_source(), images=ImageCache(tmp_path))
    assert result.key == cell.key
    assert result.facts["pixels"].startswith("CIFAR-C-style, generated")
    assert result.facts["pixels"].endswith("; scikit-learn")


def test_records_may_have_any_stream():
    record = json.loads(json.dumps(stored_result(1).to_json()))
    streams = {"order": "bursts-0.1", "labels": "switch-50", "corruption": "fog+clean"}

    def line(**fields):
        cell = {**record["cell"], **fields}
        return json.dumps({**record, "cell": cell, "key": cell_from(cell).key}).encode()

    assert read_record(line(**streams, images=3000)).cell.images == 3000
    assert "images" not in record["cell"]  # as older versions wrote it
    assert read_record(line()).cell.images is None
    for wrong in ({"images": 0}, {"order": "burst-1"}, {"labels": "drift"}):
        with pytest.raises(InputError, match=f"cell.{next(iter(wrong))}"):
            read_record(line(**wrong))


def test_a_flat_row_has_both_numbers_of_images():
    result = stored_result()
    row = flat(replace(result, cell=replace(result.cell, images=200)))
    assert (row["images"], row["most_images"]) == (192, 200)


@pytest.mark.parametrize("labels", ["drift-50", "switch-10"])
def test_the_images_of_a_schedule_are_counted_without_them(labels):
    stream = Stream(load("digits8x8", "test"), named(labels, 10), batch_size=1)
    cell = replace(DEMO_CELL, labels=labels, target="digits8x8")
    assert cost._images(cell) == pytest.approx(len(stream.indices), rel=0.05)
    assert cost._images(replace(cell, images=100)) == 100


# -- tables -----------------------------------------------------------------------------------

MINE = """
title: Mine
benchmark: cifar10-ablation
columns: streams
streams:
  plain: {labels: forward-50}
  bursts: {labels: uniform, order: bursts-0.1}
  one by one: {labels: forward-50, batch_size: 1, images: 3000, corruptions: [contrast]}
  in turn: {labels: drift-50, corruptions: [gaussian_noise+clean+fog]}
  all labels: {order: sorted, corruptions: [fog]}
rows:
  - {name: Source, method: source}
  - {name: TENT, method: tent, streams: [plain, bursts]}
"""
COLUMNS = ("plain", "bursts", "one by one", "in turn", "all labels")


def write(tmp_path, text=MINE):
    (tmp_path / "mine.yaml").write_text(text)
    return tmp_path / "mine.yaml"


@pytest.fixture
def table(tmp_path):
    return load_table(write(tmp_path))


def test_a_table_by_streams(table):
    assert (table.by, table.columns, table.rows) == ("streams", COLUMNS, ("Source", "TENT"))
    cells = table.cells()
    assert len(cells) == (4 + 4 + 1 + 1 + 3) + (4 + 4)
    by_column = {c: [x for x in cells if table.column_of(x) == c] for c in COLUMNS}
    assert {(x.order, x.labels, x.batch_size, x.images) for x in by_column["bursts"]} == {
        ("bursts-0.1", "uniform", 64, None)
    }
    (one,) = by_column["one by one"]
    assert (one.corruption, one.batch_size, one.images) == ("contrast", 1, 3000)
    (turns,) = by_column["in turn"]
    assert turns.corruptions == ("gaussian_noise", "clean", "fog")
    assert [x.labels for x in by_column["all labels"]] == ["forward-50", "uniform", "backward-50"]
    assert {table.row_of(x) for x in by_column["in turn"]} == {"Source"}


def test_its_cells_are_those_of_other_tables(table):
    other = load_table("ablations-cifar10")
    only = {"method": ["source"], "labels": ["forward-50"], "norm": ["bn"]}
    theirs = {cell.key for cell in other.cells("cpu", 1, only)}
    ours = table.cells("cpu", 1, {"row": ["Source"], "column": ["plain"]})
    assert {cell.key for cell in ours} <= theirs
    assert len(ours) == 4


def test_places_and_filters(table):
    for cell in table.cells():
        place = table.place(cell)
        assert cell in table.cells("cpu", 1, {"row": [place.row], "column": [place.column]})
    cell = table.cells("cpu", 1, {"column": ["bursts"]})[0]
    assert table.place(replace(cell, seed=3)) == Place("cpu", "Source", "bursts")
    assert table.place(replace(cell, order="bursts-1")) is None
    assert table.place(replace(cell, batch_size=32)) is None
    assert table.place(replace(cell, images=100)) is None
    assert table.place(replace(cell, labels="backward-50")) is None
    with pytest.raises(UnknownName, match=r"no column 'burst' in mine\. Did you mean 'bursts'"):
        table.cells(only={"column": ["burst"]})
    with pytest.raises(SettingError, match="no cell of mine matches"):
        table.cells(only={"column": ["in turn"], "row": ["TENT"]})


def test_groups_of_a_table_by_streams(tmp_path):
    groups = """
groups:
  slim: {benchmark: cifar10-ablation}
  wide: {benchmark: cifar10-ablation, source_recipe: {settings: {width: 32}}}"""
    table = load_table(write(tmp_path, MINE.replace("benchmark: cifar10-ablation", groups, 1)))
    assert table.rows == ("slim: Source", "slim: TENT", "wide: Source", "wide: TENT")
    places = [table.place(cell) for cell in table.cells()]
    assert len(places) == 2 * 21
    assert {p.column for p in places if p.row == "wide: Source"} == set(COLUMNS)
    assert {p.column for p in places if p.row == "wide: TENT"} == {"plain", "bursts"}


def test_a_row_may_have_batches_and_a_norm_of_its_own(tmp_path):
    path = tmp_path / "own.yaml"
    content = {
        "title": "own",
        "benchmark": "demo",
        "rows": [
            {"name": "by 16", "method": "source"},
            {"name": "by 1", "method": "source", "batch_size": 1},
            {"name": "any", "method": "source", "norm": None, "source_recipe": {"epochs": 1}},
        ],
    }
    path.write_text(yaml.safe_dump(content))
    table = load_table(path)
    cells = {row: table.cells("cpu", 1, {"row": [row]}) for row in table.rows}
    assert {c.batch_size for c in cells["by 16"]} == {16}
    assert {c.batch_size for c in cells["by 1"]} == {1}
    assert cells["by 1"][0].sequence == cells["by 16"][0].sequence
    assert table.row_of(cells["by 1"][0]) == "by 1"
    recipe = load_recipe(SourceRecipe, "demo").settings
    assert cells["any"][0].model.source["settings"] == recipe
    assert table.cells("cpu", 1, {"norm": ["none"]}) == cells["any"]
    # the same images in other batches are compared with each other
    both = [*cells["by 16"], *cells["by 1"]]
    (comparison,) = compare([table], [replace(make(), key=c.key, cell=c) for c in both])
    found = comparison.measurements
    for labels in comparison.columns:
        one, other = ({m.stream for m in found[row, labels]} for row in ("by 16", "by 1"))
        assert one == other


def test_a_benchmark_may_have_an_order_of_its_own(tmp_path):
    content = yaml.safe_load(MINE)
    profiles = {"cpu": {"source_recipe": {"recipe": "demo"}, "adapter_recipe": {"recipe": "demo"}}}
    mine = {"order": "markov-0.9", "images": 500, "labels": ["uniform"], "profiles": profiles}
    content |= {"benchmark": "mine", "benchmarks": {"mine": mine}}
    table = load_table(write(tmp_path, yaml.safe_dump(content)))
    (cell,) = table.cells("cpu", 1, {"column": ["plain"], "row": ["Source"]})
    assert (cell.order, cell.images, cell.corruption) == ("markov-0.9", 500, "clean")
    (cell,) = table.cells("cpu", 1, {"column": ["one by one"]})
    assert (cell.order, cell.images, cell.batch_size) == ("markov-0.9", 3000, 1)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("order: bursts-0.1", "order: burst-0.1", "Did you mean 'bursts-0.1'"),
        ("labels: drift-50", "labels: drfit-50", "Did you mean 'drift-50'"),
        ("+clean+fog", "+claen+fog", "Did you mean 'clean'"),
        ("batch_size: 1", "batchsize: 1", "Did you mean 'batch_size'"),
        ("images: 3000", "images: 0", "greater than or equal to 1"),
        ("[plain, bursts]", "[plain, burst]", "no stream 'burst', .* Did you mean 'bursts'"),
        ("columns: streams", "columns: labels", "streams must be given if they are the columns"),
        (
            "order: bursts-0.1}",
            "order: bursts-0.1}\n  again: {labels: forward-50, corruptions: [contrast, fog]}",
            "in row 'Source', columns 'plain' and 'again' of .* measure the same",
        ),
    ],
)
def test_what_is_wrong_in_a_file(tmp_path, old, new, says):
    assert old in MINE
    with pytest.raises(TwoshiftError, match=says):
        load_table(write(tmp_path, MINE.replace(old, new)))


# -- what is shown ----------------------------------------------------------------------------


@pytest.fixture
def results(table):
    """A result for every cell, with an accuracy of its own."""
    cells = table.cells()
    return [
        replace(make(accuracy=0.3 + i / 100), key=cell.key, cell=cell)
        for i, cell in enumerate(cells)
    ]


def test_a_comparison_of_streams(table, results):
    (comparison,) = compare([table], results)
    assert comparison.columns == list(COLUMNS)
    source, tent = comparison.rows
    for column in COLUMNS:
        expected = [r.accuracy for r in results if table.place(r)[1:] == ("Source", column)]
        assert source.numbers[column].ours == pytest.approx(100 * np.mean(expected))
    assert set(tent.numbers) == {"plain", "bursts", "mean"}
    assert tent.numbers["mean"].missing == 5  # a mean of fewer columns is marked
    assert source.by_labels == {}  # labels are not all that differs


def test_every_report_shows_them(table, results, monkeypatch):
    pytest.importorskip("jinja2")
    facts = Facts()
    compared = compare([table], facts.over(iter(results)))
    page = render(compared, facts, {r.key: r for r in results}.get)
    texts = [page, to_markdown(compared[0]), to_latex(compared[0]), to_csv(compared)]
    assert all(column in text for text in texts for column in COLUMNS)
    assert rich_comparison(table, results)


def test_a_figure_of_a_table_by_streams(tmp_path, table, results):
    pytest.importorskip("matplotlib")
    with Store(tmp_path / "results.db") as store:
        for result in results:
            store.put(result)
    desk = Desk(tmp_path / "results.db", "cpu", Workshop(tmp_path / "runs"))
    path = str(tmp_path / "mine.yaml")
    figure = figures.accuracy(desk, "Title", table=path, rows=["Source", "TENT"])
    (ax,) = figure.axes
    assert [tick.get_text() for tick in ax.get_xticklabels()] == list(COLUMNS)
    assert ax.get_xlabel() == ""
    cells = desk.cells(path, ["Source"], "contrast", ["plain", "one by one"])
    assert cells["Source", "one by one"].batch_size == 1
    only = desk.filters(path, ["Source"], "contrast", ["plain"])
    assert "--only column=plain" in desk.command(path, **only)
