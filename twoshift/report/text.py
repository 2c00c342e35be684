"""Comparisons as text: LaTeX in the paper's layout (booktabs), Markdown, CSV for spreadsheets."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Sequence

from twoshift.bench.export import csv_cell
from twoshift.bench.table import MEAN
from twoshift.report.columns import heading
from twoshift.report.compare import Comparison, Number
from twoshift.report.markdown import plain
from twoshift.report.numbers import decimal, with_interval

GROUPS = {"forward": "Forward-LT", "uniform": "Uni.", "backward": "Backward-LT"}
SPECIAL = {c: "\\" + c for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "→": r"$\rightarrow$",
}
MANY = 9  # columns, above which headings are rotated


def to_latex(table: Comparison, paper: bool = True) -> str:
    """A table environment; needs the packages booktabs, graphicx and xcolor.

    Args:
        table: The comparison.
        paper: Whether to print the paper's numbers below each row, in grey.
    """
    columns = [*table.columns, MEAN]
    lines = [
        r"\begin{table}[t]",
        r"  \centering",
        rf"  \begin{{tabular}}{{@{{}}l{'c' * len(columns)}@{{}}}}",
        r"    \toprule",
        *_head(table.columns),
        r"    \midrule",
    ]
    for row in table.rows:
        name = rf"\textit{{{escape(row.name)}}}" if row.oracle else escape(row.name)
        lines.append(_line(name, [_number(row.numbers.get(c)) for c in columns]))
        printed = row.printed(columns)
        if paper and any(printed):
            entries = [rf"\textcolor{{gray}}{{{number}}}" if number else "" for number in printed]
            lines.append(_line(r"\textcolor{gray}{\quad paper}", entries))
    lines += [r"    \bottomrule", r"  \end{tabular}", rf"  \caption{{{_caption(table)}}}"]
    return "\n".join([*lines, r"\end{table}", ""])


def _head(columns: Sequence[str]) -> list[str]:
    kinds = [c.partition("-")[0] for c in columns]
    if not set(kinds) <= set(GROUPS):
        shown = [escape(heading(c)) for c in columns]
        if len(shown) > MANY:
            shown = [rf"\rotatebox{{70}}{{{name}}}" for name in shown]
        return [_line(r"\textbf{Method}", [*shown, r"\textbf{Avg.}"])]
    names, rules, place = [], [], 2
    for kind, group in itertools.groupby(kinds):
        width = len(list(group))
        names.append(rf"\multicolumn{{{width}}}{{c}}{{\textbf{{{GROUPS[kind]}}}}}")
        rules.append(rf"\cmidrule(lr){{{place}-{place + width - 1}}}")
        place += width
    ratios = [c.partition("-")[2] or "1" for c in columns]
    return [
        _line(r"\textbf{Method}", [*names, r"\textbf{Avg.}"]),
        "    " + " ".join(rules),
        _line("", [*ratios, ""]),
    ]


def _line(name: str, entries: Iterable[str]) -> str:
    return f"    {' & '.join([name, *entries])} \\\\"


def _number(number: Number | None) -> str:
    if number is None:
        return "--"
    text = decimal(number.ours, 2)
    if number.interval is not None:
        low, high = number.interval
        text += rf"\,{{\tiny$\pm${decimal((high - low) / 2, 2)}}}"
    return rf"\textbf{{{text}}}" if number.best else text


def _caption(table: Comparison) -> str:
    caption = (
        rf"\textbf{{{escape(table.title)}.}} Accuracy in \%, mean over seeds $\pm$ half the width "
        r"of the 95\,\% interval. Bold: better than every row but oracles (in italics), by the "
        r"interval of the paired difference."
    )
    if table.notes:
        caption += f" Not comparable with the paper's numbers: {escape('; '.join(table.notes))}."
    return caption


def escape(text: str) -> str:
    """Text for LaTeX, with special characters escaped."""
    return "".join(SPECIAL.get(c, c) for c in text)


def to_markdown(table: Comparison) -> str:
    """A heading, the table, and notes and alarms."""
    columns = [*table.columns, MEAN]
    profile = f" ({plain(table.profile)} profile)" if table.profile else ""
    lines = [
        f"## {plain(table.title)}{profile}",
        "",
        "Accuracy in %, with the 95 % interval over seeds where there are several. Bold: better "
        "than every row but oracles (in italics), by the interval of the paired difference.",
        "",
        _markdown_line(["", *(plain(heading(c)) for c in columns), "worst"]),
        f"|---|{'---:|' * (len(columns) + 1)}",
    ]
    for row in table.rows:
        name = f"*{plain(row.name)}*" if row.oracle else plain(row.name)
        numbers = [_markdown_number(row.numbers.get(c)) for c in columns]
        worst = f"{decimal(row.numbers[row.worst].ours)} {plain(heading(row.worst))}"
        lines.append(_markdown_line([name, *numbers, worst]))
        if any(printed := row.printed(columns)):
            lines.append(_markdown_line(["&emsp;in the paper", *printed, ""]))
    notes = [f"- Not comparable with the paper's numbers: {plain(note)}." for note in table.notes]
    alarms = [
        f"- {plain(a.row)}, {plain(heading(a.column))}: {a.what} ({a.streams} of {a.of} streams)."
        for a in table.alarms
    ]
    if any(n.missing for row in table.rows for n in row.numbers.values()):
        notes.append("- \\*: of fewer streams than other rows have.")
    return "\n".join([*lines, *([""] if notes or alarms else []), *notes, *alarms, ""])


def _markdown_line(entries: Iterable[str]) -> str:
    return f"| {' | '.join(entries)} |"


def _markdown_number(number: Number | None) -> str:
    if number is None:
        return ""
    text = with_interval(number.ours, number.interval) + (r"\*" if number.missing else "")
    return f"**{text}**" if number.best else text


def to_csv(comparisons: Iterable[Comparison]) -> str:
    """One line per number, for spreadsheets."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    names = (
        "table profile row column accuracy low high seeds paper difference best missing comparable"
    )
    lines.writerow(names.split())
    for table in comparisons:
        for row in table.rows:
            for column, n in row.numbers.items():
                place = map(csv_cell, (table.title, table.profile, row.name, column))
                ours = [decimal(v, 2) for v in (n.ours, *(n.interval or (None, None)))]
                paper = [decimal(v, 2) for v in (n.paper, n.difference)]
                facts = [int(n.best), n.missing, int(not table.notes)]
                lines.writerow([*place, *ours, len(n.entry.seeds) or "", *paper, *facts])
    return text.getvalue()
