"""``twoshift report``: the results of a store as a page, Markdown, LaTeX or CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twoshift.cli._options import when_stopped

EXAMPLE = "Example: twoshift report results.db -o page.html -o tables.tex --table table1-cifar10"


@when_stopped("Files that were named above are whole; the others were not written.")
def report_command(
    store: Annotated[Path, typer.Argument(help="File of the results")],
    out: Annotated[
        list[Path],
        typer.Option("--out", "-o", help="A .html, .md, .tex or .csv file; repeatable"),
    ],
    table: Annotated[
        list[str] | None, typer.Option(help="Only this table, or YAML file; may be repeated")
    ] = None,
    figure: Annotated[
        list[Path] | None, typer.Option(help="An .svg or .png file for the page")
    ] = None,
) -> None:
    """Write results beside the paper's as a page that needs no network, Markdown, LaTeX or CSV."""
    from twoshift.bench.store import Store
    from twoshift.bench.table import load_table, table_names
    from twoshift.errors import SettingError, StorageError
    from twoshift.report.compare import compare
    from twoshift.report.page import Facts, Figure, render
    from twoshift.report.text import to_csv, to_latex, to_markdown
    from twoshift.storage import atomic_file

    for path in out:
        if path.suffix not in (".html", ".md", ".tex", ".csv"):
            raise SettingError("-o", must_be="a .html, .md, .tex or .csv file", got=path)
    figures = [Figure.read(path) for path in figure or []]
    facts = Facts()
    with Store(store, create=False) as opened:
        layouts = [load_table(name) for name in table or table_names()]
        compared = compare(layouts, facts.over(opened.results()), rest=not table)
        if not compared:
            cure = f"twoshift bench {table[0] if table else 'TABLE'} --store {store}"
            raise StorageError(f"{store} has no such results", cure=cure)
        for path in out:
            if path.suffix == ".html":
                text = render(compared, facts, opened.get, opened.failures(), figures)
            elif path.suffix == ".tex":
                text = "\n".join(map(to_latex, compared))
            elif path.suffix == ".md":
                text = "\n".join(map(to_markdown, compared))
            else:
                text = to_csv(compared)
            with atomic_file(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
            size = path.stat().st_size / 1e6
            typer.echo(f"{path}: {facts.results:,} results, {len(compared)} tables, {size:.2f} MB")
