"""DART's training: the variants, the choice among them, and the table of the page."""

import inspect
import json

import pytest
import torch

from reproduction import dart, rivals
from tests.documents import ROOT
from tests.reproduction.test_rivals import SPEED
from tests.toys import make_dart
from twoshift.bench.images import ImageCache
from twoshift.bench.result import Result
from twoshift.bench.table import load_table
from twoshift.calibration import fit_dart, known_facts

RECORD = dart.read(ROOT / dart.FILE)
COLUMNS = [c for c in load_table(dart.TABLE).columns if c != dart.LEFT_OUT]


def made_up(**means):
    variants = {
        name: {"settings": {}, "accuracy": {"uniform": mean - 1, "sorted": mean + 1}, "mean": mean}
        for name, mean in means.items()
    }
    return {"variants": variants, "chosen": max(means, key=means.get)}


def test_the_chosen_variant_is_in_bold():
    text = rivals.page([], SPEED, made_up(one=50.04, other=60.0))
    table = text.partition("## How DART was trained")[2].partition("| variant")[2]
    assert table.splitlines() == [
        " | U | sorted | mean |",
        "|---|---:|---:|---:|",
        "| one | 49.0 | 51.0 | 50.0 |",
        "| **other** | **59.0** | **61.0** | **60.0** |",
    ]


def test_nothing_is_chosen_before_all_are_measured():
    means = dict(zip(dart.VARIANTS, (1.0, 3.0, 2.0, 0.0), strict=True))
    variants = made_up(**means)["variants"]
    assert dart.chosen(variants) == list(dart.VARIANTS)[1]
    del variants[list(dart.VARIANTS)[3]]
    assert dart.chosen(variants) is None


@pytest.fixture
def trained(monkeypatch):
    """Trainings of a moment; the settings of each."""
    calls = []

    def fit(model, images, **settings):
        inspect.signature(fit_dart).bind(model, images, **settings)
        calls.append(settings)
        return make_dart(10)

    monkeypatch.setattr(dart, "fit_dart", fit)
    monkeypatch.setattr(dart, "source_images", lambda source, data: None)
    return calls


def test_a_finished_variant_is_not_trained_again(tmp_path, monkeypatch, trained):
    def interrupted(source, network, images):
        if len(trained) == 3:
            raise KeyboardInterrupt
        return {"uniform": 10.0 * len(trained)}, {"revision": "abc"}

    file, checkpoints = tmp_path / "selection.json", ROOT / "checkpoints"
    monkeypatch.setattr(dart, "accuracies", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dart.measure(tmp_path, checkpoints, file)
    record, settings = dart.read(file), list(dart.VARIANTS.values())
    assert list(record["variants"]) == list(dart.VARIANTS)[:2]
    assert record["chosen"] is None
    record["variants"][list(dart.VARIANTS)[1]]["settings"]["lr"] = 7.0  # another training
    file.write_text(json.dumps(record))
    trained.clear()
    monkeypatch.setattr(dart, "accuracies", lambda *a: ({"uniform": 5.0 * len(trained)}, {}))
    dart.measure(tmp_path, checkpoints, file)
    assert trained == settings[1:]
    record = dart.read(file)
    assert [row["settings"] for row in record["variants"].values()] == settings
    assert [row["mean"] for row in record["variants"].values()] == [10.0, 5.0, 10.0, 15.0]
    assert record["chosen"] == list(dart.VARIANTS)[3]
    dart.measure(tmp_path, checkpoints, file)
    assert len(trained) == 3
    record["source"] = "other weights"
    file.write_text(json.dumps(record))
    dart.measure(tmp_path, checkpoints, file)
    assert trained[3:] == settings


def test_streams_are_those_of_the_published_rows(monkeypatch):
    source, network, seen = dart.load_source(ROOT / "checkpoints" / dart.SOURCE), make_dart(10), []

    def run(cell, trial, images):
        assert cell.method == "dart"
        given = known_facts(trial, "batch")
        assert torch.equal(given["dart"]["out_bias"], network["out_bias"])
        assert given["temperature"] == known_facts(source, "batch")["temperature"]
        seen.append((cell.corruption, cell.labels, cell.order, cell.images, cell.batch_size))
        accuracy = 0.5 if cell.order == "sorted" else 0.25
        return Result("", cell, None, None, {"accuracy": accuracy}, {"revision": len(seen)})

    monkeypatch.setattr(dart, "run_cell", run)
    found, facts = dart.accuracies(source, network, ImageCache())
    assert found == {c: 50.0 if c == "sorted" else 25.0 for c in COLUMNS}
    assert facts == {"revision": len(seen)}
    table = load_table(dart.TABLE)
    cells = table.cells("cpu", only={"row": ["Recommended"], "column": COLUMNS})
    streams = [(c.corruption, c.labels, c.order, c.images, c.batch_size) for c in cells]
    assert sorted(map(str, seen)) == sorted(map(str, streams))
    assert len(seen) == 4 * 8


def test_what_the_card_says_of_the_concentration():
    few, any_labels = (
        RECORD["variants"][f"concentration {c}, lr 0.001"]["accuracy"] for c in ("0.1", "1")
    )
    assert {c for c in COLUMNS if few[c] > any_labels[c]} == {"bursts-0.1", "sorted"}


def test_the_published_choice_is_what_is_trained_and_shown():
    best = max(RECORD["variants"].values(), key=lambda row: sum(row["accuracy"].values()))
    assert RECORD["variants"][RECORD["chosen"]] == best
    assert [row["settings"] for row in RECORD["variants"].values()] == [*dart.VARIANTS.values()]
    for row in RECORD["variants"].values():
        assert list(row["accuracy"]) == COLUMNS
        assert row["mean"] == pytest.approx(sum(row["accuracy"].values()) / len(COLUMNS))
    defaults = {n: p.default for n, p in inspect.signature(fit_dart).parameters.items()}
    assert best["settings"].items() <= defaults.items()
    assert dart.section(RECORD) in (ROOT / "docs/rivals.md").read_text()
    source = dart.load_source(ROOT / "checkpoints" / dart.SOURCE)
    assert source.weights == RECORD["source"]
    network = known_facts(source, "batch")["dart"]
    assert len(network["hidden_bias"]) == best["settings"]["hidden"]
