"""The pages that test claims on the records, and `python -m reproduction.publish`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from reproduction import claims, gains, order, pages, publish
from reproduction.claims import FAILS, HOLDS, OPEN, UNMEASURED, Check, Claim, compare_tables, judge
from twoshift.bench.result import Result, SourceFacts
from twoshift.bench.store import Store
from twoshift.bench.table import load_table, table_names
from twoshift.errors import SettingError, StorageError, UnknownName

ROOT = Path(__file__).resolve().parents[2]
LABELS = [f"{way}-{n}" for way in ("forward", "backward") for n in (10, 25, 50)] + ["uniform"]


def record(cell, accuracy):
    """The fields of a result of `run_cell` that the pages read."""
    recalls = dict.fromkeys(("head_recall", "medium_recall", "tail_recall"))
    edges = dict.fromkeys(("accuracy_first10", "accuracy_last10"), accuracy)
    source, settings = cell.model.source, cell.model.source["settings"]
    facts = SourceFacts(
        source["dataset"],
        source["architecture"],
        settings["norm"],
        settings["width"],
        source["strategy"],
        cell.model.seed,
        "a" * 64,
    )
    metrics = {"accuracy": accuracy, "s_error_final": None, **recalls, **edges}
    return Result(cell.key, cell, facts, None, metrics, {"pixels": "made up"})


@pytest.fixture(scope="module")
def made_up():
    """All of Table 1 with two seeds and random accuracies."""
    rng = np.random.default_rng(0)
    cells = load_table("table1-cifar10").cells("cpu", seeds=2)
    return [record(cell, float(rng.uniform(0.2, 0.8))) for cell in cells]


def published():
    """The records of all tables; a cell that several tables share comes once."""
    records = {}
    for name in table_names():
        if (path := ROOT / "results" / f"{name}.jsonl").exists():
            for line in path.read_text().splitlines():
                result = Result.from_json(json.loads(line))
                records.setdefault(result.key, result)
    return list(records.values())


def slowly(records, first, second, labels):
    """Differences by corruption, by plain loops over raw cells; `is_row` recognises the rows."""

    def stream(r):
        return r.cell.corruption, r.cell.labels, r.cell.seed

    theirs = {stream(r): r.accuracy for r in records if is_row(r, *second)}
    differences = {}
    for corruption in sorted({r.cell.corruption for r in records}):
        means = []
        for label in labels:
            seeds = [
                100 * (r.accuracy - theirs[stream(r)])
                for r in records
                if is_row(r, *first) and stream(r)[:2] == (corruption, label)
                if stream(r) in theirs
            ]
            means.append(sum(seeds) / len(seeds) if seeds else None)
        if None not in means:
            differences[corruption] = sum(means) / len(means)
    return differences


def interval_text(differences):
    """A mean and its interval, as on the page."""
    d, n = np.array(list(differences.values())), len(differences)
    text = f"{d.mean():+.1f}"
    if n < 4:
        return text
    if n < 10:
        reach = stats.t.ppf(0.975, n - 1) * d.std(ddof=1) / np.sqrt(n)
        return f"{text} [{d.mean() - reach:+.1f}, {d.mean() + reach:+.1f}]"
    draws = np.random.default_rng(0).integers(n, size=(10_000, n))
    low, high = np.percentile([d[i].mean() for i in draws], [2.5, 97.5])
    return f"{text} [{low:+.1f}, {high:+.1f}]"


def is_row(r, method, norm, adapter=None, estimator="ema", lambdas=(1, 0, -2), lr=1e-4):
    cell = r.cell
    if (r.source.dataset, cell.target, cell.severity) != ("cifar10", None, 5):
        return False
    if (cell.order, cell.images, cell.batch_size) != ("shuffled", None, 64):
        return False
    if (cell.method, cell.adapter, cell.estimator) != (method, adapter, estimator):
        return False
    if method == "iabn" and cell.settings["lr"] != lr:
        return False
    if adapter == "trained":
        recipe = cell.model.adapter
        settings = {"condition": "scalar", "dw": "class", "lambdas": [*lambdas]}
        if recipe["points"] != 3 or recipe["adapter"] != settings:
            return False
    return r.source.norm == norm


TENT, IABN = ("tent", "bn"), ("iabn", "iabn")
TENT_OURS, IABN_OURS = (*TENT, "trained"), (*IABN, "trained")
IABN_QUICK = (*IABN, None, "ema", None, 1e-3)
IABN_CHOSEN = (*IABN_OURS, "ema", (1, -1, -2), 1e-3)
TENT_THEIRS = (*TENT_OURS, "ema", (1, -1.5, -3))
MAIN = {
    "| BN Stats − Source | B50 | below 0 | -8.70": (("bn_stats", "bn"), ("source", "bn"), "B50"),
    "| TENT − Source | B50 | below 0 | -13.56": (TENT, ("source", "bn"), "B50"),
    "| TENT+Ours − TENT | mean | above 0 | +6.06": (TENT_OURS, TENT, "mean"),
    "| TENT+Ours − TENT | B50 | above 0 | +10.00": (TENT_OURS, TENT, "B50"),
    "| TENT+Ours (lambdas 1 -1.5 -3) − TENT | mean | above 0 | +6.06": (TENT_THEIRS, TENT, "mean"),
    "| IABN+Ours − IABN | mean | above 0 | +9.81": (IABN_OURS, IABN, "mean"),
    "| IABN+Ours − IABN | B50 | above 0 | +21.95": (IABN_OURS, IABN, "B50"),
    "| IABN+Ours (lambdas 1 -1 -2 lr 1e-3) − IABN (lr 1e-3) | mean | above 0 | +9.81": (
        IABN_CHOSEN,
        IABN_QUICK,
        "mean",
    ),
    "| IABN+Ours − IABN+Ours (oracle) | mean | within 2 | -1.33": (
        IABN_OURS,
        (*IABN_OURS, "oracle"),
        "mean",
    ),
    "| TENT+Ours − TENT+Ours (oracle) | mean | within 2 | ": (
        TENT_OURS,
        (*TENT_OURS, "oracle"),
        "mean",
    ),
}


@pytest.mark.parametrize("corruptions", [15, 5, 2, 0])
def test_the_main_numbers_computed_slowly(corruptions, made_up):
    names = sorted({r.cell.corruption for r in made_up})[:corruptions]
    check_slowly([r for r in made_up if r.cell.corruption in names], corruptions)


def test_the_published_numbers_computed_slowly():
    check_slowly(published())


def check_slowly(records, corruptions=None):
    page = pages.page(records)
    for start, (first, second, at) in MAIN.items():
        (line,) = [x for x in page.splitlines() if x.startswith(start)]
        rows = [r for r in records if is_row(r, *first) or is_row(r, *second)]
        each = slowly(rows, first, second, ["backward-50"] if at == "B50" else LABELS)
        assert corruptions in (len(each), None)
        *_, ours, _, verdict = line.split(" | ")
        assert ours.strip() == (interval_text(each) if each else "")
        assert (verdict == "not measured |") == (not each)


def test_the_page_is_that_of_the_published_records():
    assert (ROOT / "docs" / "reproduction.md").read_text() == pages.page(published())


def test_gains_are_those_of_the_published_records():
    """What a row and its oracle gain over the same method without labels, from raw cells."""
    table = load_table(gains.TABLE)
    accuracies = {}
    for r in published():
        if place := table.place(r):
            cell = r.cell
            accuracies[place.row, cell.labels, cell.corruption] = 100 * r.accuracy
    lines = gains.section(published()).splitlines()
    entries_checked = 0
    for row, (without, oracle) in gains.BOUNDS.items():
        (*_, line) = [x for x in ("", *lines) if x.startswith(f"| {row} |")] or [""]
        entries = line.split(" | ")[1:] or [""] * len(table.columns)
        for column, entry in zip(table.columns, entries, strict=True):
            corruptions = [
                c
                for name, labels, c in accuracies
                if (name, labels) == (row, column)
                if (without, column, c) in accuracies
                if (oracle, column, c) in accuracies
            ]
            gained, possible = (
                np.mean(
                    [
                        accuracies[name, column, c] - accuracies[without, column, c]
                        for c in corruptions
                    ]
                )
                if corruptions
                else None
                for name in (row, oracle)
            )
            expected = f"{gained:+.1f} of {possible:+.1f}" if corruptions else ""
            assert entry.removesuffix(" |") == expected
            entries_checked += bool(corruptions)
    assert entries_checked >= 2 * len(table.columns)


@pytest.mark.parametrize("kind", ["made up", "published"])
def test_the_order_of_the_methods_from_raw_cells(kind, made_up):
    records, lacks = published(), "CoTTA"
    if kind == "made up":
        some = ("lame", "fog")
        records = [r for r in made_up if (r.cell.method, r.cell.corruption) != some]
        lacks = "LAME"
    table, cells = load_table("table1-cifar10"), {}
    for r in records:
        if place := table.place(r):
            spot = place.row, r.cell.labels
            cells.setdefault(spot, {}).setdefault(r.cell.corruption, []).append(100 * r.accuracy)
    ours = {}
    for row in table.rows:
        spots = [cells.get((row, labels), {}) for labels in LABELS]
        if all(len(spot) == 15 for spot in spots) and (row, "mean") in table.paper:
            by_label = {
                labels: np.mean([np.mean(v) for v in spot.values()])
                for labels, spot in zip(LABELS, spots, strict=True)
            }
            ours[row] = {**by_label, "mean": np.mean(list(by_label.values()))}
    assert lacks not in ours
    assert {"Source", "TENT", "IABN+Ours"} <= ours.keys()
    lines = order.section(records).splitlines()
    columns = ("forward-50", "uniform", "backward-50", "mean")
    for row in ours:
        ranks = []
        for column in columns:
            for number in (lambda r, c: ours[r][c], lambda r, c: table.paper[r, c]):
                best = sorted(ours, key=lambda r, c=column, n=number: -n(r, c))
                ranks.append(best.index(row) + 1)
        (line,) = [x for x in lines if x.startswith(f"| {row} |")]
        assert [int(x.strip(" *")) for x in line.split("|")[2:-1]] == ranks
    for start, rows in (("all", [*ours]), ("rows", [r for r in ours if "Ours" not in r])):
        (line,) = [x for x in lines if x.startswith(f"Spearman's rank correlation, {start}")]
        for name, column in zip(("F50", "U", "B50", "mean"), columns, strict=True):
            pair = [[ours[r][column] for r in rows], [table.paper[r, column] for r in rows]]
            a, b = (np.argsort(np.argsort(values)) for values in pair)
            n = len(rows)
            expected = 1 - 6 * float(((a - b) ** 2).sum()) / (n * (n**2 - 1))
            assert f" {name} {expected:+.2f}" in line


def test_without_records_nothing_is_said_but_what_is_counted():
    page = pages.page([])
    for claim in claims.load_claims():
        for check in claim.checks:
            (line,) = [x for x in page.splitlines() if x.startswith(f"| [{check.says}](")]
            counted = check.table == "table8-cost"
            assert line.endswith("| **holds** |" if counted else "|  | not measured |")
            for text in (check.holds, check.fails):
                assert counted or " ".join(text.split()[:5]) not in " ".join(page.split())


def make_check(claimed="above", minus="TENT", column="mean", **more):
    more = {"holds": "It gains {size} over {rival}.", "fails": "It loses {size}.", **more}
    if claimed == "near":
        more["within"] = 2
    return Check(
        says="it does",
        table="table1-cifar10",
        row="TENT+Ours",
        minus=minus,
        column=column,
        claimed=claimed,
        **more,
    )


def differing(differences, rows=("TENT", "TENT+Ours"), columns=None):
    """Records of two rows with these differences, in points, by corruption."""
    chosen = {"row": rows, "corruption": list(differences), "labels": columns or LABELS}
    table = load_table("table1-cifar10")
    return [
        record(c, 0.5 + differences[c.corruption] / 100 * (table.row_of(c) == "TENT+Ours"))
        for c in table.cells("cpu", only=chosen)
    ]


KINDS = ["gaussian_noise", "defocus_blur", "contrast", "jpeg_compression", "fog"]


@pytest.mark.parametrize(
    ("differences", "verdicts"),
    [
        ((5, 6, 5, 6, 5), (HOLDS, FAILS, FAILS)),
        ((-5, -6, -5, -6, -5), (FAILS, HOLDS, FAILS)),
        ((0.5, -0.5, 0.4, -0.4, 0.1), (OPEN, OPEN, HOLDS)),
        ((9, -8, 9, -8, 9), (OPEN, OPEN, OPEN)),
        ((0, 0, 0, 0, 0), (OPEN, OPEN, HOLDS)),
        ((5, 6, 5, 6), (HOLDS, FAILS, FAILS)),
        ((5, 6, 5), (OPEN, OPEN, OPEN)),
        ((5,), (OPEN, OPEN, OPEN)),
        ((), (UNMEASURED, UNMEASURED, UNMEASURED)),
    ],
)
def test_the_verdict_is_that_of_the_rule(differences, verdicts):
    parts = dict(zip(KINDS, differences, strict=False))
    comparisons = compare_tables(["table1-cifar10"], differing(parts) if parts else [])
    findings = [judge(make_check(claimed), comparisons) for claimed in ("above", "below", "near")]
    assert tuple(f.verdict for f in findings) == verdicts
    for f in findings:
        assert f.ours == (pytest.approx(np.mean(differences)) if differences else None)
        assert (f.interval is None) == (len(differences) < 4)
        assert f.parts == pytest.approx(parts)


def test_the_papers_number_is_taken_over_the_same_label_distributions():
    check = Check(
        says="db is enough",
        table="ablations-cifar10",
        row="only db",
        minus="IABN+Ours",
        paper_table="table10-parts",
        paper_row="db",
        paper_minus="gamma+beta+dW+db",
        claimed="near",
        within=1,
    )
    printed = load_table("table10-parts").paper
    differences = [
        printed["db", at] - printed["gamma+beta+dW+db", at]
        for at in ("forward-50", "uniform", "backward-50")
    ]
    assert judge(check, {}).paper == pytest.approx(sum(differences) / 3)


def test_the_verdict_at_the_border():
    assert claims.verdict((0.0, 1.0), (0.0, np.inf)) == OPEN
    assert claims.verdict((0.1, 1.0), (0.0, np.inf)) == HOLDS
    assert claims.verdict((-1.0, -0.1), (0.0, np.inf)) == FAILS
    assert claims.verdict((1.5, 2.5), (-2.0, 2.0)) == OPEN
    assert claims.verdict((2.1, 2.5), (-2.0, 2.0)) == FAILS


def test_a_corruption_without_all_columns_does_not_count():
    some = differing({"fog": 50}, columns=["uniform", "backward-50"])
    comparisons = compare_tables(["table1-cifar10"], differing(dict.fromkeys(KINDS[:4], 1)) + some)
    assert set(judge(make_check(), comparisons).parts) == set(KINDS[:4])
    assert set(judge(make_check(column="uniform"), comparisons).parts) == set(KINDS)


def test_streams_are_paired_seed_by_seed():
    table = load_table("table1-cifar10")
    chosen = {"row": ["TENT", "TENT+Ours"], "corruption": KINDS[:4]}
    pairs = table.cells("cpu", seeds=2, only=chosen)
    # the second seed is much easier, and only one of the rows has it on fog
    alone = table.cells("cpu", seeds=2, only={"row": ["TENT+Ours"], "corruption": ["fog"]})
    records = [
        record(c, 0.3 + 0.4 * c.seed + 0.01 * (table.row_of(c) == "TENT+Ours"))
        for c in (*pairs, *alone)
    ]
    comparisons = compare_tables(["table1-cifar10"], records)
    assert judge(make_check(), comparisons).parts == pytest.approx(dict.fromkeys(KINDS[:4], 1.0))


def test_the_best_row_must_beat_all_and_one_is_enough_to_refute():
    many = ["Source", "TENT", "BN Stats"]
    differences = dict(zip(KINDS, (5, 6, 5, 6, 5), strict=True))
    ours = differing(differences)

    def other(row, accuracy):
        chosen = {"row": [row], "corruption": KINDS}
        return [record(c, accuracy) for c in load_table("table1-cifar10").cells(only=chosen)]

    for source, norm, expected, rival in [
        (0.4, 0.4, HOLDS, "TENT"),
        (0.4, 0.7, FAILS, "BN Stats"),
        (0.4, 0.554, OPEN, "BN Stats"),
        (0.7, None, FAILS, "Source"),
        (0.4, None, UNMEASURED, "BN Stats"),
    ]:
        rest = other("Source", source) + (other("BN Stats", norm) if norm else [])
        f = judge(make_check(minus=many), compare_tables(["table1-cifar10"], ours + rest))
        assert (f.verdict, f.rival) == (expected, rival)
        assert (f.ours is None) == (expected == UNMEASURED)
    assert f.paper == pytest.approx(55.24 - 52.65)


def test_the_sentence_follows_the_verdict():
    def page_of(differences, claimed="above"):
        claim = Claim(
            title="A claim",
            paper="so it is",
            where="here",
            reading="Read.",
            checks=[make_check(claimed)],
        )
        return pages.page(differing(dict(zip(KINDS, differences, strict=False))), [claim])

    gains = page_of((5, 6, 5, 6, 5))
    assert "It gains 5.4 over TENT." in gains
    assert "| [it does](#a-claim) | +6.06 | +5.4 [+4.7, +6.1] | **holds** |" in gains
    assert "above 0 | +6.06 | +5.4 [+4.7, +6.1] | 5 of 5 | **holds** |" in gains
    assert "1 comparisons: holds 1, fails 0, open 0, not measured 0." in gains
    assert "It loses 5.4." in page_of((-5, -6, -5, -6, -5))
    few = page_of((5, -6))
    assert "It" not in few.partition("## A claim")[2].partition("## Not tested")[0]
    assert "- TENT+Ours − TENT, mean: defocus blur -6.0, gaussian noise +5.0." in few
    assert "| `table1-cifar10` | 2 | 1 | width-16 network (paper: 64)" in few


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"row": "TENT+Our"}, UnknownName),
        ({"minus": ["Source", "TEND"]}, UnknownName),
        ({"column": "backward-51"}, UnknownName),
        ({"paper_row": "Ours"}, UnknownName),
        ({"paper_table": "table10-parts", "paper_row": "TENT"}, UnknownName),
        ({"paper_minus": "Ours"}, UnknownName),
        ({"within": 2}, SettingError),
        ({"claimed": "near"}, SettingError),
        ({"claimed": "below", "minus": ["Source", "TENT"]}, SettingError),
        ({"colum": "mean"}, SettingError),
    ],
)
def test_a_claim_about_nothing_is_refused(wrong, error, tmp_path):
    check = {"says": "x", "table": "table1-cifar10", "row": "TENT", "minus": "Source"}
    check |= {"claimed": "above", **wrong}
    claim = {"title": "x", "paper": "x", "where": "x", "reading": "x", "checks": [check]}
    (tmp_path / "claims.yaml").write_text(json.dumps([claim]))  # JSON is YAML
    with pytest.raises(error):
        claims.load_claims(tmp_path / "claims.yaml")


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of what `python -m reproduction.publish` reads and writes."""
    for folder in ("results", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("_build"))
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["results"])
    return tmp_path


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_everything_is_made_again_and_a_second_time_changes_nothing(copy):
    committed = contents(copy)
    generated = [Path(f"docs/{name}.md") for name in ("reproduction", "speed", "reliability")]
    generated += [Path(f"results/{p.stem}.md") for p in copy.glob("results/*.jsonl")]
    generated += [Path("results/estimators.md"), Path("docs/images/accuracy_against_shift.png")]
    for path in generated:
        (copy / path).unlink()
    readme = (copy / "README.md").read_text()
    (copy / "README.md").write_text(readme.replace("| TENT |", "| SPOILT |"))
    publish.main()
    once = contents(copy)
    assert once.keys() == committed.keys()
    # another matplotlib may draw other pixels
    assert [p for p in once if once[p] != committed[p] and p.suffix != ".png"] == []
    publish.main()
    assert contents(copy) == once


def test_the_records_of_a_table_are_taken_from_a_store_that_has_more(copy, monkeypatch):
    table = load_table("table1-cifar10")
    parts = [
        {"corruption": ["contrast"], "method": ["tent"]},
        {"corruption": ["fog"], "row": ["TENT"]},
    ]
    first, second = (table.cells("cpu", only=part) for part in parts)
    cells = [*first, *second]
    with Store("some.db") as store:
        for cell in cells[1:]:
            store.put(record(cell, 0.5))
    arguments = ["--take", "table1-cifar10", "--store", "some.db"]
    monkeypatch.setattr(sys, "argv", ["results", *arguments])
    monkeypatch.setattr(publish, "PUBLISHED", copy / "published.yaml")
    publish.PUBLISHED.write_text(json.dumps({"table1-cifar10": parts[:1]}))  # JSON is YAML
    monkeypatch.setattr(publish, "remake", lambda: None)
    before = contents(copy / "results")
    with pytest.raises(StorageError, match="lacks 1 cells of table1-cifar10"):
        publish.main()
    assert contents(copy / "results") == before
    with Store("some.db") as store:
        store.put(record(cells[0], 0.5))
    publish.main()
    path = copy / "results" / "table1-cifar10.jsonl"

    def keys():
        return sorted(json.loads(line)["key"] for line in path.read_text().splitlines())

    assert keys() == sorted(c.key for c in first)
    publish.PUBLISHED.write_text(json.dumps({"table1-cifar10": parts}))
    publish.main()
    assert keys() == sorted(c.key for c in cells)
