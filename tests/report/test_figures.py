from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from tests.documents import ROOT
from twoshift.bench import embed, figure_file, toy
from twoshift.bench.figure_file import Desk, FigureFile, figure_names, load_figure
from twoshift.bench.images import ImageCache
from twoshift.bench.result import Result, SourceFacts
from twoshift.bench.store import Store
from twoshift.bench.table import load_table
from twoshift.bench.workshop import Workshop
from twoshift.cli import figure as figure_command
from twoshift.cli.figure import make_figure
from twoshift.errors import (
    InputError,
    MissingExtra,
    ModelError,
    SettingError,
    StorageError,
    UnknownName,
)
from twoshift.metrics import imbalance
from twoshift.report import draw, figures
from twoshift.report.tables import Entry

pytest.importorskip("matplotlib", reason="pip install 'twoshift[plots]'")
FOLDER = ROOT / "twoshift" / "bench" / "figures"
SHIFTS = ("forward-50", "uniform", "backward-50")
CLASSES = 10


def make_result(cell, accuracy):
    prior = np.linspace(1, 3, CLASSES) / np.linspace(1, 3, CLASSES).sum()
    estimates = [np.full(CLASSES, 1 / CLASSES), prior[::-1]]
    counts = range(CLASSES, 0, -1)
    return Result(
        key=cell.key,
        cell=cell,
        source=SourceFacts("cifar10", "resnet18_cifar", "bn", 16, "strategy", 0, "a" * 64),
        adapter=None,
        metrics={"accuracy": accuracy},
        trace={
            "true_prior": prior.tolist(),
            "prior": [e.tolist() for e in estimates],
            "s": [imbalance(e, counts) for e in estimates],
            "accuracy": [accuracy] * 2,
        },
    )


@pytest.fixture
def desk(tmp_path) -> Desk:
    """A store with TENT and both IABN rows on three label shifts; no model, no data."""
    table = load_table("table1-cifar10")
    only = {"row": ["TENT", "IABN", "IABN+Ours"], "labels": SHIFTS}
    cells = table.cells("cpu", 1, {**only, "corruption": ["gaussian_noise"]})
    with Store(tmp_path / "results.db") as store:
        for i, cell in enumerate(sorted(cells, key=lambda c: (table.row_of(c), c.labels))):
            store.put(make_result(cell, i / 10))
    return Desk(tmp_path / "results.db", "cpu", Workshop(tmp_path / "runs", tmp_path / "data"))


def made(name: str, desk: Desk):
    return figure_command.drawn(name, load_figure(name), desk)


@pytest.mark.parametrize("name", figure_names())
def test_every_file_opens_with_its_command(name):
    text = (FOLDER / f"{name}.yaml").read_text()
    assert text.startswith(f"# twoshift figure {name} ")
    content = load_figure(name)
    assert content == FigureFile.model_validate(yaml.safe_load(text))
    assert re.match(r"Figure \d|Supplementary", content.paper)
    if "table" in content.inputs:
        assert set(content.inputs["rows"]) <= set(load_table(content.inputs["table"]).rows)


def test_a_file_with_something_unknown_is_refused(desk, tmp_path, monkeypatch):
    text = (FOLDER / "tau-boundary.yaml").read_text()
    path = tmp_path / "mine.yaml"
    monkeypatch.setattr(figure_file, "_packaged", lambda: {"mine": path})
    path.write_text(text.replace("taus:", "tau:"))
    with pytest.raises(SettingError, match="figure 'mine' has no setting 'tau'"):
        made("mine", desk)
    path.write_text(text + "colour: red\n")
    with pytest.raises(ValidationError, match="colour"):
        load_figure("mine")


def test_a_misspelt_name(desk, tmp_path):
    with pytest.raises(UnknownName, match="Did you mean 'tau-boundary'"):
        make_figure("tau-boundry", tmp_path / "x.svg", desk)


def test_a_file_of_another_kind_is_refused_before_the_work(desk, tmp_path, monkeypatch):
    monkeypatch.setattr(figure_command, "drawn", lambda *_: pytest.fail("worked"))
    with pytest.raises(SettingError, match=r"FILE.svg or FILE.png, got x.pdf"):
        make_figure("tau-boundary", tmp_path / "x.pdf", desk)


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_files_are_whole_and_the_same_every_time(desk, tmp_path, suffix, start):
    files = [tmp_path / "new" / f"{i}.{suffix}" for i in range(2)]
    for file in files:
        make_figure("label-distributions", file, desk)
    first, second = (file.read_bytes() for file in files)
    assert first == second
    assert first.startswith(start)
    assert len(first) > 10_000
    assert sorted(files[0].parent.iterdir()) == files


def test_accuracy_is_measured_beside_the_paper(desk):
    figure = made("accuracy-shift", desk)
    measured, paper = figure.axes
    assert "width 16, gaussian_noise" in measured.get_title("left")
    drawn = {line.get_label(): line for line in measured.lines}
    # 0.0, 0.1 ... by row, then labels by the alphabet: backward-50, forward-50, uniform
    assert set(drawn) == {"IABN", "IABN+Ours", "TENT"}
    assert list(drawn["IABN+Ours"].get_ydata()) == pytest.approx([40, 50, 30])
    places = drawn["IABN+Ours"].get_xdata()
    assert np.round(places).tolist() == [0, 3, 6]  # F50, U, B50 among the paper's
    ticks = [label.get_text() for label in paper.get_xticklabels()]
    assert ticks == ["F50", "F25", "F10", "U", "B10", "B25", "B50"]
    printed = {line.get_label(): list(line.get_ydata()) for line in paper.lines}
    assert list(printed) == load_figure("accuracy-shift").inputs["rows"]
    assert printed["Source"] == pytest.approx([56.78, 55.27, 52.82, 44.74, 37.28, 34.78, 33.88])
    same = {line.get_label(): line.get_color() for line in paper.lines}
    assert drawn["TENT"].get_color() == same["TENT"]


def test_several_seeds_have_intervals():
    entries = {"uniform": Entry((0.4, 0.6)), "forward-50": Entry((0.5,))}
    (ax,) = draw.accuracy({"here": {"TENT": entries}}, "Title").axes
    (bar,) = ax.collections
    (((x, low), (_, high)),) = bar.get_segments()
    assert x == 1  # after F50
    assert (low, high) == pytest.approx([100 * v for v in entries["uniform"].interval])


def test_methods_stand_side_by_side():
    entries = {"uniform": Entry((0.4, 0.6)), "forward-50": Entry((0.5, 0.7))}
    (ax,) = draw.accuracy({"here": dict.fromkeys(("TENT", "IABN", "SAR"), entries)}, "T").axes
    first, middle, last = (line.get_xdata() for line in ax.lines)
    assert list(middle) == [1, 0]
    assert list(first - middle) == list(middle - last) == pytest.approx([-draw.SIDE] * 2)
    bars = [bar.get_segments()[0][0, 0] for bar in ax.collections]
    assert bars == [place for line in ax.lines for place in line.get_xdata()]


def test_results_that_are_missing_come_with_the_command(desk, tmp_path):
    with pytest.raises(InputError, match=r"6 of 6 .* twoshift bench table1-cifar100 .*--only row="):
        made("label-estimate-cifar100", desk)
    other = Desk(desk.store, "paper", desk.workshop)
    with pytest.raises(InputError, match="twoshift bench table1-cifar10 --profile paper"):
        made("accuracy-shift", other)
    with pytest.raises(StorageError, match=r"nowhere\.db"):
        made("accuracy-shift", Desk(tmp_path / "nowhere.db", "cpu", desk.workshop))


def test_estimates_are_drawn_against_the_truth(desk):
    figure = made("label-estimate-cifar10", desk)
    upper, lower = figure.axes[0], figure.axes[3]
    assert [ax.get_title("left") for ax in figure.axes[:3]] == [f"{y} labels" for y in SHIFTS]
    truth, without, with_adapter = upper.lines
    assert [line.get_label() for line in upper.lines] == ["truth", "IABN", "IABN+Ours"]
    share = np.linspace(1, 3, CLASSES) / np.linspace(1, 3, CLASSES).sum()
    s = np.linspace(1, -1, CLASSES) @ share
    assert truth.get_ydata()[0] == pytest.approx(s)
    assert list(without.get_ydata()) == pytest.approx([0, -s])
    assert list(with_adapter.get_xdata()) == [1, 2]
    assert [bar.get_height() for bar in lower.patches] == pytest.approx(100 * share)
    assert list(lower.lines[0].get_ydata()) == pytest.approx(100 * share[::-1])


def test_long_tailed_sets_have_the_published_counts():
    inputs = load_figure("label-distributions").inputs
    ten, hundred = (
        figures.long_tail(shifts=inputs["shifts"], **facts)
        for facts in inputs["long_tailed"].values()
    )
    assert ten["training"].tolist() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert (ten["training"].sum(), hundred["training"].sum()) == (12_406, 10_847)
    assert (ten["forward-50"][0], ten["forward-50"][-1]) == (1000, 20)
    assert ten["backward-50"].tolist() == ten["forward-50"].tolist()[::-1]
    assert (ten["uniform"] == 1000).all()
    assert (hundred["uniform"] == 100).all()


def test_lists_are_counted_and_what_is_missing_is_said(desk):
    files = load_figure("label-distributions").inputs["lists"]["VisDA-C (RSUT)"].values()
    for file, labels in zip(files, ([0, 0, 0, 2], [0, 1, 1, 1, 1]), strict=True):
        path = desk.workshop.data / "lists" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"some where/{i} of it.png {y}\n" for i, y in enumerate(labels)))
    figure = made("label-distributions", desk)
    titles = [ax.get_title("left") for ax in figure.axes]
    assert titles[2:] == ["VisDA-C (RSUT)"]
    training, test = figure.axes[2].lines
    # by frequency in training: class 0, then 2, which has none in the test, then 1
    assert list(training.get_ydata()) == [75, 25, 0]
    assert list(test.get_ydata()) == [20, 0, 80]
    assert (training.get_label(), test.get_label()) == ("training (RS): 4", "test (UT): 5")
    note = figure.get_supxlabel()
    assert "Without ImageNet-C, OfficeHome" in note
    assert "VisDA" not in note


def test_the_published_lists(shared_data):
    folder = shared_data / "lists"
    if not folder.is_dir():
        pytest.skip("no lists in the data folder")
    lists = load_figure("label-distributions").inputs["lists"]

    def counts(name: str) -> list[np.ndarray]:
        paths = {split: folder / file for split, file in lists[name].items()}
        return list(figures.counts_of_lists(paths).values())

    source, target = counts("VisDA-C (RSUT)")
    assert (len(source), source.sum(), target.sum()) == (12, 36_875, 13_400)
    assert np.argsort(source).tolist() == np.argsort(-target).tolist()  # reversed
    forward, uniform, backward = counts("ImageNet-C")
    assert (forward.sum(), uniform.sum()) == (12_058, 50_000)
    assert sorted(forward) == sorted(backward)
    assert all(len(c) == 40 for c in counts("DomainNet: as it is"))


def test_boundaries_are_drawn_where_they_are():
    def classifier(place):
        def logits(x):
            return (x[:, :1] - place) * x.new_tensor([-1.0, 1.0])

        return logits

    places = {0.0: 0.9, 1.0: 0.1, 2.0: -0.7}
    trained = toy.Boundaries(
        toy.plane(),
        {tau: classifier(x) for tau, x in places.items()},
        {name: classifier(x) for name, x in zip(toy.POSITIONS, places.values(), strict=True)},
    )
    figure = draw.boundaries(**toy.boundary_map(trained)._asdict(), title="Title")
    for ax in figure.axes:
        contours = [c for c in ax.collections if hasattr(c, "levels")]
        drawn = [c.get_paths()[0].vertices[:, 0].mean() for c in contours]
        assert drawn == pytest.approx(list(places.values()), abs=1e-3)
        clouds = [len(c.get_offsets()) for c in ax.collections if not hasattr(c, "levels")]
        assert clouds == [600, round(600 * trained.plane.prior[1])]
    names = [text.get_text() for ax in figure.axes for text in ax.get_legend().get_texts()]
    assert {"tau = 0", "tau = 2", "reversed labels", "tail class"} <= set(names)


def test_maps_colour_the_true_classes():
    places, labels = np.arange(12.0).reshape(6, 2), np.array([0, 1, 2, 0, 1, 0])
    figure = draw.maps({"TENT": (places, labels), "IABN": (places, labels)}, list("abc"), "Title")
    for ax in figure.axes:
        assert [len(c.get_offsets()) for c in ax.collections] == [3, 2, 1]
        assert ax.collections[1].get_offsets().tolist() == places[labels == 1].tolist()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]


def test_colours_differ():
    for colours in (draw.COLOURS, draw.CLASS_COLOURS):
        assert len({c.lower() for c in colours}) == len(colours)


def test_features_need_models_that_are_there(desk, monkeypatch):
    monkeypatch.setattr(embed, "tsne_package", lambda: None)
    with pytest.raises(ModelError, match=r"not in .*runs. twoshift bench table1-cifar10"):
        made("tsne", desk)


def test_features_of_real_models(desk, shared_data, monkeypatch):
    monkeypatch.setattr(embed, "tsne_package", lambda: None)
    monkeypatch.setattr(embed, "tsne", lambda h: h[:, :2])
    load_images = ImageCache.of

    def few(self, cell, source):
        clean = load_images(self, type(cell)(cell.method), source)  # corrupting takes too long
        return clean.subset(np.arange(150))

    monkeypatch.setattr(ImageCache, "of", few)
    works = Workshop(desk.workshop.models, shared_data, [ROOT / "checkpoints"])
    figure = made("tsne", Desk(desk.store, "cpu", works))
    titles = [ax.get_title("left") for ax in figure.axes]
    assert [title.partition(":")[0] for title in titles] == ["TENT", "IABN+Ours"]
    right = [float(re.search(r"([\d.]+) % right", title)[1]) for title in titles]
    assert min(right) > 50
    assert figure.legends[0].get_texts()[0].get_text() == "airplane"


def test_without_the_extras_the_cure_is_told(desk, monkeypatch):
    monkeypatch.setitem(sys.modules, "openTSNE", None)
    with pytest.raises(MissingExtra, match=r"pip install 'twoshift\[tsne\]'"):
        made("tsne", desk)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"pip install 'twoshift\[plots\]'"):
        made("label-estimate-cifar10", desk)
