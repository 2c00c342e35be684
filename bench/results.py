"""Every table and figure that README and docs show, made again from the records in ``results/``.

    python -m bench.results
    python -m bench.results --take TABLE --store FILE [--only NAME=VALUE,VALUE ...] [--add]

No data set, no trained model, no network; a second run changes no byte. ``--take`` publishes the
records of a table first, instead of those that are published or, with ``--add``, beside them. Not
made here, for want of records: ``docs/images/label_estimate.png``, which shows every batch, and the
photographs of the report's page.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import baselines, estimators, foundation, headline, reproduction, speed_report
from bench.runner import Result, read
from twoshift.bench.store import Store, export_lines, import_lines
from twoshift.bench.table import load_table, table_names
from twoshift.cli import demo
from twoshift.cli.report import report_command
from twoshift.errors import StorageError
from twoshift.report import draw
from twoshift.storage import atomic_file

RESULTS, DOCS, README = Path("results"), Path("docs"), Path("README.md")


def lines_of(name: str) -> Path:
    """Where records are published."""
    return RESULTS / f"{name}.jsonl"


def take(name: str, store: Path, only: Mapping[str, Sequence[str]], add: bool = False) -> None:
    """Publish the records of a table, or of some of it; the store may hold others, too.

    Args:
        name: Of the table.
        store: Where the records are.
        only: Which of them.
        add: Keep what is published already.
    """
    wanted = {cell.key for cell in load_table(name).cells(only=only)}
    with (
        tempfile.TemporaryDirectory() as folder,
        Store(store, create=False) as full,
        Store(Path(folder) / "some.db") as some,
    ):
        if missing := wanted - full.keys():
            cure = f"Measure them: twoshift bench {name} --store {store}"
            raise StorageError(f"{store} lacks {len(missing)} cells of {name}", cure=cure)
        if add:
            import_lines(some, lines_of(name))
        for result in full.results():
            if result["key"] in wanted - some.keys():
                some.put(result)
        export_lines(some, lines_of(name))


def report(name: str) -> None:
    """The table of published records, as ``twoshift report`` makes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.db"
        with Store(path) as store:
            import_lines(store, lines_of(name))
        report_command(path, [RESULTS / f"{name}.md"], [name])


def texts(published: Sequence[str]) -> dict[Path, str]:
    """What is made of records by other means."""
    records = _records(published)
    return {
        README: headline.put(README.read_text(), headline.text(records)),
        RESULTS / "cifar10-foundation.md": foundation.summary(read(lines_of("cifar10-foundation"))),
        RESULTS / "cifar10-baselines.md": baselines.summary(read(lines_of("cifar10-baselines"))),
        RESULTS / "demo.md": demo.as_markdown(read(lines_of("demo"))),
        RESULTS / "estimators.md": estimators.table(_json("estimators")),
        DOCS / "speed.md": speed_report.markdown(_json("speed")),
        DOCS / "reproduction.md": reproduction.page(records),
        DOCS / "beyond.md": reproduction.beyond_page(records),
    }


def _records(published: Sequence[str]) -> list[Result]:
    """All of them; tables share cells."""
    found: dict[str, Result] = {}
    for record in (r for name in published for r in read(lines_of(name))):
        found.setdefault(record["key"], record)
    return list(found.values())


def _json(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def remake() -> None:
    """All of it."""
    published = [name for name in table_names() if lines_of(name).exists()]
    for name in published:
        report(name)
    for path, text in texts(published).items():
        with atomic_file(path) as temporary:
            temporary.write_text(text)
    images = DOCS / "images"
    draw.save(headline.figure(_records(published)), images / "both_shifts.png")
    figure = demo.accuracy_figure(read(lines_of("demo")))
    draw.save(figure, images / "accuracy_against_shift.png")


def main() -> None:
    """Publish what is asked for, and make everything anew."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--take", metavar="TABLE", help="publish its records first")
    parser.add_argument("--store", type=Path, default=Path("results.db"), help="where they are")
    parser.add_argument("--only", action="append", default=[], help="as of twoshift bench")
    parser.add_argument("--add", action="store_true", help="keep what is published of it")
    given = parser.parse_args()
    if given.take:
        pairs = (text.partition("=") for text in given.only)
        only = {name: values.split(",") for name, _, values in pairs}
        take(given.take, given.store, only, given.add)
    remake()


if __name__ == "__main__":
    main()
