from __future__ import annotations

import pytest

from tests.report.records import make, published
from twoshift.bench.store import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "results.db"
    with Store(path) as opened:
        for result in published()[::7]:
            opened.put(result)
        opened.fail(make().cell, "Traceback\nOSError: disk full")
    return path


def test_a_page_latex_csv_and_markdown(twoshift, store, tmp_path):
    paths = [tmp_path / f"out.{kind}" for kind in ("html", "tex", "csv", "md")]
    options = [word for path in paths for word in ("-o", path)]
    code, out, err = twoshift("report", store, *options, "--table", "table1-cifar10")
    assert (code, err) == (0, "")
    assert f"{paths[0]}: 47 results, 1 tables, 0." in out.replace("\n", " ")
    page, latex, sheet, notes = (path.read_text() for path in paths)
    assert notes.startswith("## ")
    assert "<!doctype html>" in page
    assert "OSError: disk full" in page
    assert latex.startswith(r"\begin{table}")
    assert sheet.startswith("table,profile,row,column,accuracy")
    assert "clean images" not in page


def test_a_figure_is_embedded(twoshift, store, tmp_path):
    figure = tmp_path / "figure.png"
    figure.write_bytes(b"\x89PNG")
    page = tmp_path / "page.html"
    options = ("--table", "table1-cifar10", "--figure", figure)
    assert twoshift("report", store, "-o", page, *options)[0] == 0
    assert "data:image/png;base64,iVBORw==" in page.read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("-o", "page.pdf"), "must be a .html, .md, .tex or .csv file, got page.pdf"),
        (("-o", "page.html", "--table", "table1-cifar"), "Did you mean"),
        (("-o", "page.html", "--table", "table5-domainnet"), "twoshift bench table5-domainnet"),
        (("-o", "page.html", "--figure", "none.png"), "cannot read none.png"),
    ],
)
def test_what_cannot_be_is_told(twoshift, store, monkeypatch, tmp_path, options, says):
    monkeypatch.chdir(tmp_path)
    code, _, err = twoshift("report", store, *options)
    assert code == 2
    assert says in err
    assert not list(tmp_path.iterdir())


def test_a_store_must_be_there(twoshift, tmp_path):
    code, _, err = twoshift("report", tmp_path / "none.db", "-o", tmp_path / "page.html")
    assert code == 2
    assert "none.db" in err
