"""Records of other people: a line that would break a report later is refused when it comes in."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.bench.stored import make_result
from tests.documents import ROOT
from twoshift.bench.cell import cell_from
from twoshift.bench.export import export_csv, rows
from twoshift.bench.record import read_record
from twoshift.bench.store import Store, import_lines
from twoshift.bench.table import load_table
from twoshift.errors import InputError, TwoshiftError
from twoshift.report.compare import compare
from twoshift.report.page import Facts, render
from twoshift.report.text import to_csv, to_latex, to_markdown

TABLE = load_table("table1-cifar10")
RECORD = json.loads(json.dumps(make_result(1, adapter="trained").to_json()))


def changed(place: str, value: Any, record: dict[str, Any] = RECORD) -> dict[str, Any]:
    """The record with another value at a place, and the key that belongs to it."""
    record = copy.deepcopy(record)
    *parents, last = place.split(".")
    part = record
    for name in parents:
        part = part[name]
    part[last] = value
    if place.startswith("cell"):
        with suppress(TwoshiftError, TypeError, AttributeError, ValueError):
            record["key"] = cell_from(record["cell"]).key
    return record


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "results").glob("*.jsonl")))
def test_published_results_can_be_imported(tmp_path, name):
    with Store(tmp_path / "results.db") as store:
        lines = (ROOT / "results" / name).read_text().splitlines()
        assert import_lines(store, ROOT / "results" / name) == len(lines)


def test_a_record_comes_back_as_it_was():
    assert read_record(json.dumps(RECORD).encode()).to_json() == RECORD


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("facts", 3.0, "facts"),
        ("facts", [], "facts"),
        ("facts.seconds", "long", r"facts\.seconds"),
        ("facts.seconds", -1.0, r"facts\.seconds: .*greater than or equal to 0"),
        ("facts.peak_memory_mb", [], r"facts\.peak_memory_mb"),
        ("facts.pixels", {"deep": {}}, r"facts\.pixels"),
        ("metrics.accuracy", 57.0, r"metrics\.accuracy: .*less than or equal to 1.*got 57"),
        ("metrics.accuracy", -0.1, r"metrics\.accuracy"),
        ("metrics.accuracy", None, r"metrics\.accuracy"),
        ("metrics.accuracy", "0.5", r"metrics\.accuracy"),
        ("metrics.accuracy", True, r"metrics\.accuracy"),
        ("metrics.images", -5, r"metrics\.images"),
        ("metrics.images", 0, r"metrics\.images"),
        ("metrics.images", 1.5, r"metrics\.images"),
        ("metrics.images", 10**40, r"metrics\.images"),
        ("metrics.nll", 10**400, r"metrics\.nll"),
        ("metrics.nll", [1.0], r"metrics\.nll"),
        ("metrics", {"accuracy": 0.5}, r"metrics\.images: Field required"),
        ("metrics", None, "metrics"),
        ("metrics.tail_recall", 2, r"metrics\.tail_recall"),
        ("metrics.s_error_final", "x", r"metrics\.s_error_final"),
        ("trace", [], "trace"),
        ("trace.s", "abc", r"trace\.s"),
        ("trace.s", [None], r"trace\.s"),
        ("trace.prior", [0.5], r"trace\.prior"),
        ("trace.accuracy", [7], r"trace\.accuracy"),
        ("source.seed", "0", r"source\.seed"),
        ("source.width", "wide", r"source\.width"),
        ("source.width", [], r"source\.width"),
        ("source.norm", 3, r"source\.norm"),
        ("source.dataset", None, r"source\.dataset"),
        ("source.weights", 12, r"source\.weights"),
        ("source.dataset", "\x1b[2J", "control characters"),
        ("source.dataset", "\ud800", "a unicode string"),
        ("source.dataset", "x" * 501, "at most 500"),
        ("adapter", 3, "adapter"),
        ("key", 3, "key"),
        ("cell.labels", "", r"cell\.labels"),
        ("cell.labels", "forward-many", r"cell\.labels"),
        ("cell.labels", "forwards-5", r"cell\.labels"),
        ("cell.seed", -1, r"cell\.seed"),
        ("cell.seed", 0.5, r"cell\.seed"),
        ("cell.severity", 9, r"cell\.severity"),
        ("cell.batch_size", 0, r"cell\.batch_size"),
        ("cell.order", "backwards", r"cell\.order"),
        ("cell.corruption", 5, r"cell\.corruption"),
        ("cell.settings", [], r"cell\.settings|fields"),
        ("cell.model.source", 3, "cell"),
        ("cell.model.source.epochs", [3], r"epochs, must be an integer"),
        ("cell.model.seed", None, r"cell\.model\.seed"),
    ],
)
def test_what_would_break_a_report_is_refused(place, value, says):
    with pytest.raises(InputError, match=says):
        read_record(json.dumps(changed(place, value)).encode())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"[" * 100_000, "at most 20 levels deep"),
        (
            json.dumps(changed("cell.settings.x", json.loads("[" * 30 + "]" * 30))).encode(),
            "20 levels",
        ),
        (b'{"key": NaN}', "NaN, which JSON does not have"),
        (json.dumps(RECORD).replace("0.125", "Infinity").encode(), "Infinity"),
        (json.dumps(RECORD).replace("0.125", "1e999").encode(), "s_error_final"),
        (json.dumps(RECORD).replace("192", "1" * 5000).encode(), "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"", "not JSON"),
        (b"null", "what run_cell returns"),
    ],
)
def test_lines_that_are_no_records(line, says):
    with pytest.raises(InputError, match=says):
        read_record(line)


def test_a_line_without_end(store, tmp_path, monkeypatch):
    monkeypatch.setattr("twoshift.bench.store.LONGEST", 5000)
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps(RECORD) + "\n" + " " * 6000)
    with pytest.raises(InputError, match="line 2: a line, must be shorter than 5,000 bytes"):
        import_lines(store, lines)
    assert len(store) == 0


ODD = [3.0, -1, 57, "", "x", "=1+1", "a|b`<i>\n", None, True, [], {}, [1], {"a": [None]}, 10**30]


def places(record: Any, above: str = "") -> Iterator[str]:
    for name, value in record.items():
        yield f"{above}{name}"
        if isinstance(value, dict):
            yield from places(value, f"{above}{name}.")


@pytest.mark.parametrize("place", [*places(RECORD)])
def test_whatever_is_accepted_can_be_reported(tmp_path, place):
    """Every part of a record is replaced by odd values: each is refused, or all reports work."""
    lines = tmp_path / "lines.jsonl"
    for i, value in enumerate(ODD):
        lines.write_text(json.dumps(changed(place, value)) + "\n")
        with Store(tmp_path / f"{i}.db") as store:
            try:
                import_lines(store, lines)
            except TwoshiftError:
                assert len(store) == 0
                continue
            facts = Facts()
            compared = compare([TABLE], facts.over(store.results()))
            render(compared, facts, store.get)
            assert all(write(table) for write in (to_latex, to_markdown) for table in compared)
            to_csv(compared)
            export_csv(store, tmp_path / "out.csv")
            assert rows(store)
            store.seconds()
