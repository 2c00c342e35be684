"""Names of records in Markdown and CSV, as a reader of these formats sees them."""

from __future__ import annotations

import csv
import io

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from reproduction import markdown as pages
from tests.bench.stored import make_result
from tests.report.records import Paper, make
from twoshift.bench.export import csv_cell, export_csv
from twoshift.bench.store import Store
from twoshift.report.compare import compare
from twoshift.report.markdown import plain
from twoshift.report.tables import Entry, markdown, rich_table
from twoshift.report.text import to_csv, to_markdown

NAMES = [
    "a|b",
    "`code`",
    "**bold** _it_ snake_case",
    "<script>alert(1)</script>",
    "[link](javascript:x)",
    "![x](http://x)",
    "# head",
    "back\\slash | and \\| more",
    "~~gone~~ $x$",
    "[/] [bold]",
]
reader = MarkdownIt("commonmark").enable("table")


def cells(text: str) -> list[list[str]]:
    """Texts of the cells of all tables, row by row; anything but text in one is an error."""
    rows: list[list[str]] = []
    in_cell = False
    for token in reader.parse(text):
        if token.type == "tr_open":
            rows.append([])
        in_cell = in_cell or token.type in ("th_open", "td_open")
        if token.type in ("th_close", "td_close"):
            in_cell = False
        if in_cell and token.type == "inline":
            kinds = {child.type for child in token.children} - {"text", "text_special"}
            assert kinds <= {"em_open", "em_close", "strong_open", "strong_close"}, kinds
            rows[-1].append("".join(child.content for child in token.children))
    return rows


def named(name: str):
    class Named(Paper):
        def place(self, found):
            return super().place(found)._replace(row=name)

    results = [make("tent", labels) for labels in ("forward-50", "uniform")]
    return compare([Named(title=name, columns=("forward-50", "uniform"))], results)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_shown_as_it_is(name):
    (comparison,) = named(name)
    head, row = cells(to_markdown(comparison))
    assert row[0] == name
    assert len(head) == len(row) == len(comparison.columns) + 3
    tokens = reader.parse(to_markdown(comparison))
    assert sum(t.type == "heading_open" for t in tokens) == 1
    grid = {name: {"uniform": Entry((0.5,))}}
    assert cells(markdown(grid))[1][0] == name


def test_a_name_of_several_lines_stays_in_its_cell():
    assert plain("a\nb\r\n | c") == r"a b \| c"


def test_pages_keep_their_own_formatting_but_not_more_columns():
    text = pages.table(["", "x"], [["**bold**", "a|b\nc"], [r"a\|b", "`x`"]])
    assert text.splitlines()[2:] == [r"| **bold** | a\|b c |", r"| a\|b | `x` |"]


def test_markup_of_the_terminal_is_shown():
    console = Console(file=io.StringIO(), width=200)
    console.print(rich_table({"[/] [bold]": {"uniform": Entry((0.5,))}}, "title"))
    assert "[/] [bold]" in console.file.getvalue()


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("=1+1", "'=1+1"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t=1"),
        ("\r=1", "'\r=1"),
        ("-0.5", "-0.5"),
        ("+1e-3", "+1e-3"),
        ("TENT + x", "TENT + x"),
        ("", ""),
        (-0.5, -0.5),
        (None, None),
    ],
)
def test_text_that_a_spreadsheet_would_run_is_quoted(value, written):
    assert csv_cell(value) == written


def test_every_csv_file_is_quoted(tmp_path):
    (line,) = list(csv.DictReader(io.StringIO(to_csv(named("=1+1")))))[:1]
    assert (line["table"], line["row"]) == ("'=1+1", "'=1+1")
    result = make_result()
    result.facts["=head"] = "@x"
    with Store(tmp_path / "results.db") as store:
        store.put(result)
        export_csv(store, tmp_path / "results.csv")
    with (tmp_path / "results.csv").open(newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert row["facts_=head"] == "'@x"
    assert not any(value[:1] in ("=", "@", "+") for value in row.values())
