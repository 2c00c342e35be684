from __future__ import annotations

import csv

from tests.report.records import Paper, make
from twoshift.data.corruptions import corruptions
from twoshift.report.compare import compare
from twoshift.report.text import escape, to_csv, to_latex, to_markdown

LABELS = ("forward-50", "forward-25", "uniform", "backward-50")


def table(**options):
    results = [
        make(method, labels, base + 0.01 * seed, seed)
        for method, base in (("source", 0.3), ("tent", 0.5))
        for labels in LABELS
        for seed in range(2)
    ]
    return compare([Paper(columns=LABELS, **options)], results)[0]


def test_latex_has_the_papers_layout():
    lines = [line.strip() for line in to_latex(table(title="A & B")).splitlines()]
    assert lines[3:7] == [
        r"\toprule",
        r"\textbf{Method} & \multicolumn{2}{c}{\textbf{Forward-LT}} & \multicolumn{1}{c}"
        r"{\textbf{Uni.}} & \multicolumn{1}{c}{\textbf{Backward-LT}} & \textbf{Avg.} \\",
        r"\cmidrule(lr){2-3} \cmidrule(lr){4-4} \cmidrule(lr){5-5}",
        r"& 50 & 25 & 1 & 50 &  \\",
    ]
    source = next(line for line in lines if line.startswith("source"))
    assert source.count("&") == 5
    assert r"30.50\,{\tiny$\pm$6.35}" in source
    assert r"\textbf{A \& B.}" in lines[-2]


def test_latex_is_bold_where_the_interval_says_so():
    text = to_latex(table())
    assert text.count(r"\textbf{50.50\,{\tiny$\pm$6.35}}") == 5
    assert r"\textbf{30.50" not in text


def test_the_papers_numbers_are_grey_and_may_be_left_out():
    measured = table(paper={("tent", "uniform"): 43.65})
    grey = r"\textcolor{gray}{43.65}"
    assert grey in to_latex(measured)
    assert "Not comparable" in to_latex(measured)
    assert grey not in to_latex(measured, paper=False)


def test_what_latex_would_read_as_a_command_is_escaped():
    assert escape(r"a_b & 5 % \input{x}") == r"a\_b \& 5 \% \textbackslash{}input\{x\}"


def test_many_columns_are_turned():
    class ByCorruption(Paper):
        def place(self, found):
            return super().place(found)._replace(column=found.cell.corruption)

    names = tuple(corruptions)[:12]
    results = [make(corruption=name) for name in names]
    (measured,) = compare([ByCorruption(columns=(*names, "uniform"))], results)
    assert rf"\rotatebox{{70}}{{{names[3].replace('_', ' ')}}}" in to_latex(measured)


def test_markdown_has_intervals_the_papers_numbers_and_what_to_know():
    text = to_markdown(table(title="A | B", paper={("tent", "uniform"): 43.65}))
    lines = text.splitlines()
    assert lines[0] == r"## A \| B (cpu profile)"
    rows = [line for line in lines if line.startswith("|")]
    assert rows[0] == "|  | F50 | F25 | U | B50 | mean | worst |"
    assert len({row.count("|") for row in rows}) == 1
    source = next(row for row in rows if row.startswith("| source"))
    assert source.split(" | ")[1] == "30.5 [24.1, 36.9]"
    assert source.rstrip(" |").endswith("30.5 F50")
    tent = next(row for row in rows if row.startswith("| tent"))
    assert tent.count("**50.5 [44.1, 56.9]**") == 5
    assert rows[rows.index(tent) + 1].split(" | ")[3] == "43.65"
    assert any(line.startswith("- Not comparable with the paper") for line in lines)


def test_csv_has_a_line_per_number():
    paper = {("tent", "uniform"): 43.65}
    lines = list(csv.DictReader(to_csv([table(title="A, B", paper=paper)]).splitlines()))
    assert len(lines) == 2 * (len(LABELS) + 1)
    (line,) = [x for x in lines if (x["row"], x["column"]) == ("tent", "uniform")]
    assert line == {
        "table": "A, B",
        "profile": "cpu",
        "row": "tent",
        "column": "uniform",
        "accuracy": "50.50",
        "low": "44.15",
        "high": "56.85",
        "seeds": "2",
        "paper": "43.65",
        "difference": "6.85",
        "best": "1",
        "missing": "0",
        "comparable": "0",
    }
