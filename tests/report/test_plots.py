from __future__ import annotations

import sys

import pytest

from twoshift.errors import MissingExtra
from twoshift.metrics import imbalance
from twoshift.report import plots
from twoshift.report.tables import Entry

PNG = b"\x89PNG\r\n\x1a\n"
COUNTS = [40, 20, 10, 5]
TABLE = {
    "TENT": {"forward-50": Entry((0.5, 0.7)), "uniform": Entry((0.4, 0.4))},
    "TENT + adapter, oracle prior": {"forward-50": Entry((0.8, 0.8)), "uniform": Entry((0.7, 0.9))},
}


def run(labels="uniform", method="tent", adapter=None):
    estimates = [[0.25, 0.25, 0.25, 0.25], [0.4, 0.3, 0.2, 0.1]]
    return {
        "cell": {"method": method, "adapter": adapter, "estimator": "ema", "labels": labels},
        "trace": {
            "true_prior": [0.1, 0.2, 0.3, 0.4],
            "prior": estimates,
            "s": [imbalance(e, COUNTS) for e in estimates],
        },
    }


DRAW = {
    "accuracy": lambda path: plots.accuracy_against_shift(TABLE, path, "Title"),
    "estimate": lambda path: plots.estimate_over_time(
        [run(), run(adapter="trained"), run("backward-50")], COUNTS, path, "Title"
    ),
}


@pytest.fixture
def figures(monkeypatch):
    """What would be saved, still open."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    kept = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: kept.append(figure))
    yield kept
    for figure in kept:
        pyplot.close(figure)


@pytest.mark.parametrize("draw", DRAW.values(), ids=DRAW)
def test_a_plot_is_a_png_and_its_figure_is_closed(draw, tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before = pyplot.get_fignums()
    path = tmp_path / "new" / "plot.png"
    draw(path)
    content = path.read_bytes()
    assert content.startswith(PNG)
    assert len(content) > 5000
    assert pyplot.get_fignums() == before
    assert list(path.parent.iterdir()) == [path]


def test_the_same_results_make_the_same_file(tmp_path):
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "1.png", tmp_path / "2.png"
    DRAW["accuracy"](first)
    DRAW["accuracy"](second)
    assert first.read_bytes() == second.read_bytes()


def test_a_figure_that_cannot_be_saved_is_closed_too(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before = pyplot.get_fignums()
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match="cannot write"):
        DRAW["accuracy"](tmp_path / "file" / "plot.png")
    assert pyplot.get_fignums() == before


def test_accuracy_lines_are_the_means(figures, tmp_path):
    DRAW["accuracy"](tmp_path / "plot.png")
    (axes,) = figures[0].axes
    drawn = {line.get_label(): line for line in axes.lines}
    assert list(drawn) == list(TABLE)
    assert list(drawn["TENT"].get_ydata()) == pytest.approx([60, 40])
    assert drawn["TENT"].get_linestyle() == "-"
    assert drawn["TENT + adapter, oracle prior"].get_linestyle() == "--"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["F50", "U"]
    assert len(axes.collections) == 2  # a band of the interval for each


def test_single_seeds_have_no_bands(figures, tmp_path):
    table = {"TENT": {"forward-50": Entry((0.5,)), "uniform": Entry((0.4,))}}
    plots.accuracy_against_shift(table, tmp_path / "plot.png")
    assert not figures[0].axes[0].collections


def test_estimates_are_drawn_against_the_truth(figures, tmp_path):
    DRAW["estimate"](tmp_path / "plot.png")
    upper, other, lower, _ = figures[0].axes
    assert upper.get_title("left") == "uniform labels"
    assert other.get_title("left") == "backward-50 labels"
    truth, *estimates = upper.lines
    # weights +1, 1/3, -1/3, -1 from the class with most training images to the rarest
    assert truth.get_ydata()[0] == pytest.approx(0.1 + 0.2 / 3 - 0.3 / 3 - 0.4)
    assert [line.get_label() for line in estimates] == ["TENT", "TENT + adapter"]
    assert list(estimates[0].get_ydata()) == pytest.approx([0, 0.4 + 0.3 / 3 - 0.2 / 3 - 0.1])
    assert [bar.get_height() for bar in lower.patches] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert list(lower.lines[0].get_ydata()) == pytest.approx([0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize("draw", DRAW.values(), ids=DRAW)
def test_without_matplotlib_the_cure_is_told(draw, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it fails
    with pytest.raises(MissingExtra, match=r"pip install 'twoshift\[plots\]'"):
        draw(tmp_path / "plot.png")
    assert not list(tmp_path.iterdir())
