"""Every table and figure that README and docs show, made again from the records in ``results/``.

    python -m reproduction.publish
    python -m reproduction.publish --take TABLE --store FILE

No data set, no trained model, no network; a second run changes no byte. ``--take`` first publishes
the records of a table, as much of it as ``published.yaml`` names. Not made here, for want of
records: ``docs/images/label_estimate.png``, which shows every batch, and the photographs of the
report's page.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks import speed_report
from reproduction import estimators, headline, pages
from reproduction.records import Record, read
from twoshift.bench.store import Store, export_lines, import_lines
from twoshift.bench.table import load_table
from twoshift.cli import demo
from twoshift.cli.report import report_command
from twoshift.errors import StorageError
from twoshift.report import draw
from twoshift.storage import atomic_file

RESULTS, DOCS, README = Path("results"), Path("docs"), Path("README.md")
PUBLISHED = Path(__file__).with_name("published.yaml")
VIEWS = {"table15-cifar10-corruptions": "table1-cifar10"}  # tables of another one's records


def lines_of(name: str) -> Path:
    """Where records are published."""
    return RESULTS / f"{name}.jsonl"


def published() -> dict[str, list[dict[str, list[str]]]]:
    """What is published of every table: its parts, each as filters of cells."""
    found: dict[str, list[dict[str, list[str]]]] = yaml.safe_load(PUBLISHED.read_text("utf-8"))
    return found


def published_keys(name: str) -> set[str]:
    """Of the cells of a table that are published."""
    table = load_table(name)
    return {cell.key for part in published()[name] for cell in table.cells("cpu", only=part)}


def take(name: str, store: Path) -> None:
    """Publish the records of a table; the store may hold others, too."""
    wanted = published_keys(name)
    with (
        tempfile.TemporaryDirectory() as folder,
        Store(store, create=False) as full,
        Store(Path(folder) / "some.db") as some,
    ):
        if missing := wanted - full.keys():
            cure = f"Measure them: python -m reproduction.measure {name} --store {store}"
            raise StorageError(f"{store} lacks {len(missing)} cells of {name}", cure=cure)
        for result in full.results():
            if result["key"] in wanted:
                some.put(result)
        export_lines(some, lines_of(name))


def report(name: str) -> None:
    """The table of published records, as ``twoshift report`` makes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.db"
        with Store(path) as store:
            import_lines(store, lines_of(VIEWS.get(name, name)))
        report_command(path, [RESULTS / f"{name}.md"], [name])


def texts(names: Sequence[str]) -> dict[Path, str]:
    """What is made of records by other means."""
    records = _records(names)
    return {
        README: headline.put(README.read_text(), headline.text(records)),
        RESULTS / "demo.md": demo.as_markdown(read(lines_of("demo"))),
        RESULTS / "estimators.md": estimators.table(_json("estimators")),
        DOCS / "speed.md": speed_report.markdown(_json("speed")),
        DOCS / "reproduction.md": pages.page(records),
        DOCS / "beyond.md": pages.beyond_page(records),
    }


def _records(names: Sequence[str]) -> list[Record]:
    """All of them; tables share cells."""
    found: dict[str, Record] = {}
    for record in (r for name in names for r in read(lines_of(name))):
        found.setdefault(record["key"], record)
    return list(found.values())


def _json(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def remake() -> None:
    """All of it."""
    names = list(published())
    for name in (*names, *VIEWS):
        report(name)
    for path, text in texts(names).items():
        with atomic_file(path) as temporary:
            temporary.write_text(text)
    images = DOCS / "images"
    draw.save(headline.figure(_records(names)), images / "both_shifts.png")
    figure = demo.accuracy_figure(read(lines_of("demo")))
    draw.save(figure, images / "accuracy_against_shift.png")


def main() -> None:
    """Publish what is asked for, and make everything anew."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--take", choices=list(published()), metavar="TABLE", help="publish its records first"
    )
    parser.add_argument("--store", type=Path, default=Path("results.db"), help="where they are")
    given = parser.parse_args()
    if given.take:
        take(given.take, given.store)
    remake()


if __name__ == "__main__":
    main()
