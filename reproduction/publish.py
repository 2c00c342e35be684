"""Make every table and figure of README and docs again from the records in ``results/``.

    python -m reproduction.publish
    python -m reproduction.publish --take TABLE --store FILE

Needs no data set, trained model or internet; a second run changes no byte. ``--take`` first
publishes the records of a table, or the parts of it that ``published.yaml`` names. Two kinds of
pictures are not made here, because the records do not hold what they show:
``docs/images/label_estimate.png``, which shows every batch, and the screenshots of the report.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks import reliability_report, speed_report
from reproduction import (
    accuracy_page,
    dart,
    estimators,
    guard,
    headline,
    own_classifier,
    pages,
    passes,
    rivals,
)
from reproduction.records import read
from twoshift.bench.store import Store, export_lines, import_lines
from twoshift.bench.table import load_table
from twoshift.cli import demo
from twoshift.cli.report import report_command
from twoshift.errors import StorageError
from twoshift.report import draw
from twoshift.storage import atomic_file

RESULTS, DOCS, README = Path("results"), Path("docs"), Path("README.md")
OWN_DATA, PREDICT, WATCH = DOCS / "own-data.md", DOCS / "predict.md", DOCS / "watch.md"
PUBLISHED = Path(__file__).with_name("published.yaml")
VIEWS = {"table15-cifar10-corruptions": "table1-cifar10"}  # tables made of another one's records


def records_file(name: str) -> Path:
    """The file with the published records of a table."""
    return RESULTS / f"{name}.jsonl"


def published() -> dict[str, list[dict[str, list[str]]]]:
    """The parts of every table that are published, each as filters of cells."""
    return yaml.safe_load(PUBLISHED.read_text("utf-8"))


def published_keys(name: str) -> set[str]:
    """The keys of the cells of a table that are published."""
    table = load_table(name)
    return {cell.key for part in published()[name] for cell in table.cells("cpu", only=part)}


def take(name: str, store: Path) -> None:
    """Publish the records of a table from a store, which may hold others as well."""
    keys = published_keys(name)
    with (
        tempfile.TemporaryDirectory() as folder,
        Store(store, create=False) as full,
        Store(Path(folder) / "some.db") as some,
    ):
        if missing := keys - full.keys():
            cure = f"Measure them: python -m reproduction.measure {name} --store {store}"
            raise StorageError(f"{store} lacks {len(missing)} cells of {name}", cure=cure)
        for result in full.results():
            if result.key in keys:
                some.put(result)
        export_lines(some, records_file(name))


def report(name: str) -> None:
    """Make the table of published records, as ``twoshift report`` does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.db"
        with Store(path) as store:
            import_lines(store, records_file(VIEWS.get(name, name)))
        report_command(path, [RESULTS / f"{name}.md"], [name])


def _json(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def remake() -> None:
    """Make all tables, pages and figures again."""
    for name in (*published(), *VIEWS):
        report(name)
    # a cell that several tables share comes once
    by_key = {r.key: r for name in published() for r in read(records_file(name))}
    records = list(by_key.values())
    of_demo = {record.key: record for record in read(records_file("demo"))}
    demo_records = [of_demo[cell.key] for cell in load_table("demo").cells("cpu")]
    texts = {
        README: headline.insert(README.read_text(), headline.text(records)),
        RESULTS / "demo.md": demo.as_markdown(demo_records),
        RESULTS / "estimators.md": estimators.table(_json("estimators")),
        OWN_DATA: own_classifier.insert(OWN_DATA.read_text(), _json("own-classifier")),
        WATCH: guard.insert(WATCH.read_text(), _json("guard")),
        DOCS / "accuracy.md": accuracy_page.page(_json("accuracy"), _json("accuracy-features")),
        PREDICT: passes.insert(PREDICT.read_text(), _json("passes")),
        DOCS / "speed.md": speed_report.page(_json("speed"), _json("streams-speed")),
        DOCS / "reliability.md": reliability_report.page(_json("reliability")),
        DOCS / "reproduction.md": pages.page(records),
        DOCS / "beyond.md": pages.beyond_page(records),
        DOCS / "rivals.md": rivals.page(records, _json("speed"), dart.read()),
    }
    for path, text in texts.items():
        with atomic_file(path) as temporary:
            temporary.write_text(text)
    images = DOCS / "images"
    draw.save(headline.figure(records), images / "both_shifts.png")
    draw.save(rivals.figure(records, _json("speed")), images / "rivals.png")
    draw.save(demo.accuracy_figure(demo_records), images / "accuracy_against_shift.png")


def main() -> None:
    """Publish a table if one is named, and make everything again."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--take", choices=list(published()), metavar="TABLE", help="publish its records first")
    add("--store", type=Path, default="results.db", metavar="FILE", help="store with the results")
    options = parser.parse_args()
    if options.take:
        take(options.take, options.store)
    remake()


if __name__ == "__main__":
    main()
