"""Published numbers come from the records, by the code that wrote them."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from reproduction import claims, estimators, headline, measure, publish
from reproduction.records import read
from twoshift import cli
from twoshift.adapters import load_adapter
from twoshift.bench.store import Store
from twoshift.bench.table import load_table, table_names
from twoshift.bench.workshop import Workshop
from twoshift.calibration import calibration_of
from twoshift.cli import demo
from twoshift.cli.train import assignments
from twoshift.report import tables
from twoshift.train.checkpoint import load_source
from twoshift.train.recipes import SourceRecipe, load_recipe

PUBLISHED = publish.published()
ROOT = Path(__file__).resolve().parents[2]


def test_what_is_published_is_named():
    tables = {t for t in table_names() if (ROOT / "results" / f"{t}.jsonl").exists()}
    assert tables == {*PUBLISHED, "demo"}  # which `make demo-results` publishes


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_table_is_whole(name):
    lines = (ROOT / "results" / f"{name}.jsonl").read_text().splitlines()
    keys = [json.loads(line)["key"] for line in lines]
    assert len(keys) == len(set(keys))
    assert set(keys) == publish.published_keys(name)


@pytest.mark.parametrize("name", [*PUBLISHED, *publish.VIEWS])
def test_a_published_table_is_made_of_its_records(name, tmp_path):
    folder = ROOT / "results"
    records = folder / f"{publish.VIEWS.get(name, name)}.jsonl"
    for arguments in (
        ["import", str(records), "--store", str(tmp_path / "store.db")],
        ["report", str(tmp_path / "store.db"), "--table", name, "-o", str(tmp_path / "table.md")],
    ):
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 0, result.output
    assert (tmp_path / "table.md").read_text() == (folder / f"{name}.md").read_text()


def test_what_is_published_is_measured_part_by_part(monkeypatch, tmp_path):
    """The commands run on the real command line, which only counts missing cells."""
    counted = []

    def count(words, check):
        assert check
        result = CliRunner().invoke(cli.app, [*words[3:], "--status", "--json"])
        assert result.exit_code == 0, result.output
        counted.append(json.loads(result.output)["cells"])

    steps = []
    monkeypatch.setattr(measure.subprocess, "run", count)
    monkeypatch.setattr(publish, "take", lambda *arguments: steps.append(arguments))
    monkeypatch.setattr(publish, "remake", lambda: steps.append("pages"))
    store = tmp_path / "some.db"
    Store(store).close()
    line = ["measure", "table1-cifar10", "ablations-cifar10", "--store", str(store)]
    monkeypatch.setattr("sys.argv", line)
    measure.main()
    parts = [(load_table(t), part) for t in line[1:3] for part in PUBLISHED[t]]
    assert counted == [len(table.cells("cpu", only=part)) for table, part in parts]
    assert steps == [("table1-cifar10", store), ("ablations-cifar10", store), "pages"]


def test_the_adapters_of_the_repository_are_those_of_records():
    folders = sorted((ROOT / "checkpoints").glob("*-adapter*"))
    files = (ROOT / "results").glob("*.jsonl")
    measured = {r.adapter for path in files for r in read(path)}
    assert len(folders) > 3
    for folder in folders:
        assert load_adapter(folder).fingerprint() in measured, folder.name


def test_from_nothing_the_models_of_the_tables_are_trained():
    """``make -n``: every source model is trained by its recipe, in the first folder searched."""
    command = ["make", "-n", "reproduce-cifar10", "DATA=D"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    def commands(text):
        return [shlex.split(line) for line in lines.splitlines() if text in line]

    trained, folders = [], set()
    for words in commands("twoshift train source"):
        options = dict(zip(words[3::2], words[4::2], strict=True))
        recipe = load_recipe(SourceRecipe, options["--recipe"], **assignments([options["--set"]]))
        trained.append(recipe.model_dump(mode="json"))
        folders.add(str(Path(options["--out"]).parent))
    (measured,) = commands("reproduction.measure")
    tables = [word for word in measured if word in PUBLISHED]
    assert set(tables) == {name for name in PUBLISHED if name.endswith("-cifar10")}
    expected = {
        json.dumps(cell.model.source, sort_keys=True)
        for name in tables
        for part in PUBLISHED[name]
        for cell in load_table(name).cells("cpu", only=part)
    }
    assert {json.dumps(recipe, sort_keys=True) for recipe in trained} == expected
    assert folders == {measured[measured.index("--models") + 1]}


def test_the_readme_shows_what_the_records_say():
    readme = (ROOT / "README.md").read_text()
    tilts, others = mean_accuracies("recommended-cifar10"), mean_accuracies("beyond-cifar10")
    records = [r for name in PUBLISHED for r in read(ROOT / "results" / f"{name}.jsonl")]
    unique = list({record.key: record for record in records}.values())
    assert headline.insert(readme, headline.text(unique)) == readme
    whole = set(claims.corruptions_of("recommended-cifar10"))
    for row, name in headline.ROWS.items():
        lines = [x for x in readme.splitlines() if x.startswith(f"| {name} |")]
        if measured_corruptions("recommended-cifar10", row) != whole:
            assert not lines  # a mean over fewer corruptions could not be compared
            continue
        (line,) = lines
        seven = [mean for (r, _), mean in tilts.items() if r == row]
        assert len(seven) == 7
        numbers = [tilts[row, c] for c in ("forward-50", "uniform", "backward-50")]
        numbers += [sum(seven) / 7, min(seven)]
        numbers += [others[row, c] for c in ("permuted-50", "dirichlet-0.1")]
        assert [float(n) for n in line.split("|")[2:-1]] == pytest.approx(numbers, abs=0.0501)
    mild = mean_accuracies("mild-cifar10")
    (line,) = [x for x in readme.splitlines() if "hardly changed (" in x]
    for row in {row for row, _ in mild} & headline.ROWS.keys():
        mean = sum(mild[row, c] for c in ("forward-50", "uniform", "backward-50")) / 3
        match = re.search(re.escape(headline.ROWS[row]) + r" (\d+\.\d)[,.]", line)
        assert float(match[1]) == pytest.approx(mean, abs=0.0501)
    page = (ROOT / "docs" / "reproduction.md").read_text()
    (line,) = [x for x in readme.splitlines() if x.startswith("The paper's claims, tested")]
    marks = {"hold": "**holds**", "fail": "**fails**", "are open": "open"}
    for words, mark in marks.items():
        lines = [x for x in page.splitlines() if x.startswith("| [") and x.endswith(f"| {mark} |")]
        assert f" {len(lines)} {words}" in line
    (ranks,) = re.findall(r"without the adapter: .* mean ([+-]\d\.\d\d)\.", page)
    assert f"the rank correlation with its Table 1 is {ranks}." in line


def measured_corruptions(name, row):
    """The corruptions on which a row was measured, from raw records."""
    table = load_table(name)
    records = read(ROOT / "results" / f"{name}.jsonl")
    return {r.cell.corruption for r in records if table.row_of(r) == row}


def mean_accuracies(name):
    """Mean accuracy by row and labels, from raw records."""
    table, accuracies = load_table(name), {}
    for record in read(ROOT / "results" / f"{name}.jsonl"):
        spot = table.row_of(record), record.cell.labels
        accuracies.setdefault(spot, []).append(100 * record.accuracy)
    return {spot: sum(values) / len(values) for spot, values in accuracies.items()}


def test_a_published_cell_can_be_measured_again(shared_data, tmp_path):
    """The shortest cell, from pixels to metrics; other machines round in other places."""
    shortest = {"method": "source", "corruption": "contrast", "labels": "backward-50"}
    (record,) = [
        r
        for r in read(ROOT / "results" / "table1-cifar10.jsonl")
        if shortest.items() <= vars(r.cell).items()
    ]
    data = tmp_path / "data"
    data.mkdir()
    (data / "cifar-10-batches-bin").symlink_to(shared_data / "cifar-10-batches-bin")
    workshop = Workshop(tmp_path / "models", data, also=[ROOT / "checkpoints"])
    again = workshop.run(record.cell)
    assert again.source.weights == record.source.weights
    assert again.facts["pixels"] == record.facts["pixels"]
    assert again.metrics["images"] == record.metrics["images"]
    assert again.accuracy == pytest.approx(record.accuracy, abs=2e-3)


def test_the_source_model_is_strong_enough():
    (record,) = [
        r
        for r in read(ROOT / "results" / "mild-cifar10.jsonl")
        if r.cell.method == "source"
        if (r.cell.corruption, r.cell.labels) == ("clean", "uniform")
    ]
    assert record.accuracy >= 0.72


SOURCES = sorted(p for p in (ROOT / "checkpoints").glob("cifar10-*") if "-adapter" not in p.name)


@pytest.mark.parametrize("folder", SOURCES, ids=lambda folder: folder.name)
def test_checkpoints_are_whole_and_listed(folder):
    """The row of docs/models.md is what the card says."""
    source = load_source(folder)
    card, net = source.card, source.model
    assert sum(card.class_counts) == 12_406
    assert net(torch.rand(2, 3, 32, 32)).isfinite().all()
    assert sum(p.stat().st_size for p in folder.rglob("*")) < 5e6
    settings = ", ".join(f"{name} {value}" for name, value in card.recipe["settings"].items())
    accuracy = 100 * card.measured["balanced_accuracy_held_out"]
    row = [f"`{folder.name}`", f"`{card.architecture}`", settings, card.strategy.replace("_", " ")]
    row += [str(card.recipe["epochs"]), f"{accuracy:.1f}"]
    calibration = calibration_of(source)
    row += ["no" if calibration is None else f"{calibration.folds} folds"]
    assert f"| {' | '.join(row)} |" in (ROOT / "docs" / "models.md").read_text().splitlines()


def test_only_checkpoints_that_exist_are_listed():
    listed = re.findall(r"^\| `(cifar10-[\w-]+)` \|", (ROOT / "docs/models.md").read_text(), re.M)
    assert sorted(listed) == [folder.name for folder in SOURCES]


def test_the_demos_table_is_that_of_its_results():
    cells = load_table("demo").cells("cpu")
    records = {record.key: record for record in read(ROOT / "results" / "demo.jsonl")}
    assert records.keys() == {cell.key for cell in cells}
    results = [records[cell.key] for cell in cells]
    main = {
        name: {labels: cells[labels] for labels in demo.MAIN}
        for name, cells in tables.grid(results).items()
    }
    table = tables.with_mean(main)
    changes = tables.markdown_differences(tables.differences(table, demo.PAIRS))
    published = (ROOT / "results" / "demo.md").read_text()
    assert published == tables.markdown(table) + "\n" + changes


def test_the_table_of_the_estimators_is_that_of_their_results():
    record = json.loads((ROOT / "results" / "estimators.json").read_text())
    assert (ROOT / "results" / "estimators.md").read_text() == estimators.table(record)
    again = estimators.errors(0, estimators.TARGETS["reversed"])
    assert again.keys() == record.keys()
    for name, row in record.items():  # one run is near the mean of thirty
        assert again[name] == pytest.approx(row["reversed"], abs=0.25)
