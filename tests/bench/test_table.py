from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from functools import cache
from importlib import resources

import pytest
import yaml

from twoshift import estimators, methods
from twoshift.bench import presets
from twoshift.bench.cell import Cell, cell_from
from twoshift.bench.table import Place, table_names
from twoshift.bench.table import load_table as read_table
from twoshift.data import load
from twoshift.data.corruptions import BENCHMARK
from twoshift.errors import TwoshiftError, UnknownName
from twoshift.registry import check_settings
from twoshift.train.recipes import AdapterRecipe, SourceRecipe, load_recipe

load_table = cache(read_table)  # the same ones again and again
LABELS = (
    "forward-50",
    "forward-25",
    "forward-10",
    "uniform",
    "backward-10",
    "backward-25",
    "backward-50",
)
BOTH, PAPER = ("cpu", "paper"), ("paper",)
# name: profiles, rows, cells of the first profile with one seed
EXPECTED = {
    "table1-cifar10": (BOTH, 21, 21 * 105),
    "table1-cifar100": (BOTH, 17, 17 * 105),
    "table2-imagenet": (PAPER, 17, 17 * 105),
    "table3-visda": (PAPER, 17, 17),
    "table4-officehome": (PAPER, 17, 17 * 6),
    "table5-domainnet": (PAPER, 17, 17 * 12),
    "table6-prior": (BOTH, 21, 14 * 105),
    "table7-baselines": (BOTH, 18, 18 * 105),
    "table8-cost": ((), 5, 0),
    "table10-parts": (BOTH, 13, 13 * 105),
    "table11-source": (BOTH, 39, 39 * 105),
    "table12-points": (BOTH, 10, 10 * 105),
    "table13-delta-isfda": (PAPER, 9, 9),
    "table14-sar": (BOTH, 18, 18 * 105),
    "table15-cifar10-corruptions": (BOTH, 17, 17 * 105),
    "table16-cifar100-corruptions": (BOTH, 17, 17 * 105),
    "table17-imagenet-corruptions": (PAPER, 17, 17 * 105),
}
OURS = [
    "ablations-cifar10",
    "beyond-cifar10",
    "demo",
    "finals-cifar10",
    "mild-cifar10",
    "pacs",
    "recommended-cifar10",
    "selection-cifar10",
    "selection-models",
    "selection-streams-cifar10",
    "streams-cifar10",
    "streams-models",
    "streams-others",
]
MEASURED = [name for name in EXPECTED if name != "table8-cost"]
ONE = {"labels": ["uniform"], "corruption": ["fog"]}


@pytest.fixture(scope="module")
def table():
    return load_table("table1-cifar10")


def one_of_each(name: str, profile: str) -> list[Cell]:
    """Every row once per column of domains."""
    found = load_table(name)
    if found.by == "domains":
        return found.cells(profile, seeds=1)
    return found.cells(profile, seeds=1, only=ONE)


def test_all_of_them_in_the_papers_order():
    assert table_names() == [*EXPECTED, *OURS]


@pytest.mark.parametrize("name", EXPECTED)
def test_size(name):
    table = load_table(name)
    profile = table.profiles[0] if table.profiles else "cpu"
    assert (table.profiles, len(table.rows), len(table.cells(profile, 1))) == EXPECTED[name]


@pytest.mark.parametrize("name", OURS)
def test_those_of_our_own_can_be_measured(name):
    """Names and settings of every row, down to the trainings."""
    for cell in load_table(name).cells("cpu", seeds=1):
        check_settings(cell.method, methods.methods[cell.method], cell.settings)
        assert cell.model is not None
        SourceRecipe.model_validate(cell.model.source)
        if cell.adapter == "trained":
            AdapterRecipe.model_validate(cell.model.adapter)
        assert cell.estimator in estimators.estimators


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_opens_with_the_command_that_runs_it(name):
    with (yaml_folder() / f"{name}.yaml").open() as lines:
        opening = next(lines)
    profiles = load_table(name).profiles
    profile = f" --profile {profiles[0]}" if profiles else ""
    assert opening == f"# twoshift bench {name}{profile}\n"


def yaml_folder():
    return resources.files("twoshift.bench") / "tables"


@pytest.mark.parametrize("name", MEASURED)
def test_every_row_is_a_cell_that_can_be_built(name):
    for profile in load_table(name).profiles:
        cells = one_of_each(name, profile)
        assert len({cell.key for cell in cells}) == len(cells)
        for cell in cells:
            assert json.loads(json.dumps(asdict(cell))) == asdict(cell)
            check_settings("method", methods.methods[cell.method], cell.settings)
            kind = estimators.estimators[cell.estimator]
            check_settings("estimator", kind, cell.estimator_settings)
            assert SourceRecipe.model_validate(cell.model.source).model_dump() == cell.model.source
            if needs_iabn(cell.method):
                assert cell.model.source["settings"]["norm"] == "iabn"
            assert (cell.model.adapter is None) == (cell.adapter != "trained")
            if cell.model.adapter is not None:
                recipe = AdapterRecipe.model_validate(cell.model.adapter)
                assert recipe.model_dump() == cell.model.adapter


def needs_iabn(method: str) -> bool:
    return "IABN layers" in methods.methods[method].needs


def test_keys_are_unique_over_streams_and_seeds(table):
    only = {"row": ["TENT", "IABN+Ours"], "corruption": ["fog", "snow"]}
    cells = table.cells("cpu", seeds=2, only=only)
    assert len({cell.key for cell in cells}) == len(cells) == 2 * 2 * 2 * 7


@pytest.mark.parametrize("name", MEASURED)
def test_a_cell_finds_its_place(name):
    table = load_table(name)
    for profile in table.profiles:
        cells = one_of_each(name, profile)
        places = [table.place(cell) for cell in cells]
        assert {p.profile for p in places} == {profile}
        assert len(set(places)) == len(places)
        assert {p.row for p in places} <= set(table.rows)
        assert {p.column for p in places} <= set(table.columns)
        record = cell_from(json.loads(json.dumps(asdict(cells[-1]))))
        assert table.place(record) == places[-1]
        assert table.row_of(cells[-1]) == places[-1].row
        assert table.column_of(record) == places[-1].column


def test_no_place_for_what_is_not_of_the_table(table):
    cell = table.cells("cpu", 1, {"row": ["TENT"]})[0]
    assert table.place(replace(cell, seed=7, labels="uniform")) == Place("cpu", "TENT", "uniform")
    other = [
        replace(cell, labels="forward-100"),
        replace(cell, corruption="saturate"),
        replace(cell, severity=4),
        replace(cell, settings={**cell.settings, "lr": 0.5}),
        replace(cell, model=None),
        load_table("table1-cifar100").cells("cpu", 1, {"row": ["TENT"]})[0],
    ]
    assert [table.place(o) for o in other] == [None] * len(other)
    with pytest.raises(UnknownName, match="not in table1-cifar10"):
        table.row_of(other[0])


def test_the_stream_decides_the_column():
    by_labels = load_table("table1-cifar10")
    by_corruption = load_table("table15-cifar10-corruptions")
    assert (by_labels.columns, by_corruption.columns) == (LABELS, BENCHMARK)
    cell = by_labels.cells("cpu", 1, {"row": ["Source"], **ONE})[0]
    assert (by_labels.column_of(cell), by_corruption.column_of(cell)) == ("uniform", "fog")
    home = load_table("table4-officehome")
    assert home.columns == ("C→P", "C→R", "P→C", "P→R", "R→C", "R→P")
    (cell,) = home.cells("paper", 1, {"row": ["TENT"], "column": ["P→R"]})
    assert cell.model.source["dataset"] == "office_home:product"
    assert (cell.target, cell.labels, cell.corruption) == (
        "office_home:real_world",
        "natural",
        "clean",
    )
    assert home.column_of(cell) == "P→R"


def test_tables_share_cells():
    cells = load_table("table1-cifar10").cells("cpu", 1, {"row": ["IABN+Ours"], **ONE})
    for name, row in (("table6-prior", "estimate"), ("table7-baselines", "Ours+IABN")):
        assert load_table(name).cells("cpu", 1, {"row": [f"CIFAR-10-C: {row}"], **ONE}) == cells


@pytest.mark.parametrize("name", MEASURED)
def test_the_rows_that_are_always_there(name):
    cells = one_of_each(name, "paper")
    there = {(c.method, c.adapter, c.estimator) for c in cells}
    assert {c.method for c in cells} >= {"source", "bn_stats", "iabn"}
    live = "tent" if name == "table13-delta-isfda" else "iabn"
    assert there >= {(live, "identity", "ema"), (live, "trained", "ema")}
    assert there >= {(live, "trained", "oracle"), (live, "logit", "oracle")}
    table = load_table(name)
    oracles = {table.row_of(c) for c in cells if c.estimator == "oracle"}
    assert oracles == table.oracles == {row for row in table.rows if "oracle" in row}


def test_profiles_are_the_recipes(table):
    for profile, recipe, width, seeds in (("cpu", "cifar-cpu", 16, 1), ("paper", "cifar", 64, 3)):
        cells = table.cells(profile, only={"row": ["IABN+Ours"], **ONE})
        assert [(c.seed, c.model.seed) for c in cells] == [(s, s) for s in range(seeds)]
        iabn = {"width": width, "norm": "iabn"}
        source = load_recipe(SourceRecipe, recipe, dataset="cifar10", settings=iabn)
        assert cells[0].model.source == source.model_dump()
        assert cells[0].model.adapter == load_recipe(AdapterRecipe, recipe).model_dump()
    with pytest.raises(UnknownName, match=r"no profile 'pape'\. Did you mean 'paper'"):
        table.cells("pape")


def test_settings_are_the_presets(table):
    def settings(row, chosen=table, profile="cpu"):
        return chosen.cells(profile, 1, {"row": [row], **ONE})[0].settings

    assert settings("TENT") == {"lr": 1e-3, "optim": "adam"}
    assert settings("TENT+Ours")["freeze"] == settings("TENT+identity adapter")["freeze"]
    assert settings("TENT+Ours")["freeze"] == ["layer4"]
    imagenet = load_table("table2-imagenet")
    assert settings("IABN", imagenet, "paper") == {"lr": 2.5e-4, "optim": "sgd", "momentum": 0.1}
    (cell,) = imagenet.cells("paper", 1, {"row": ["IABN+Ours"], **ONE})
    assert (cell.severity, cell.estimator_settings) == (3, {"top_k": 3})
    shown = cell.model.source["settings"]
    assert (shown["norm"], shown["k"]) == ("iabn", 8.0)
    assert cell.model.source["architecture"] == "resnext50_32x4d"
    (source,) = imagenet.cells("paper", 1, {"row": ["Source"], **ONE})
    assert (source.estimator_settings, source.model.source["settings"]["norm"]) == ({}, "bn")


# supplementary, hyper-parameters and A.3
TRAININGS = {
    "table1-cifar10": ("cifar10", "resnet18_cifar", 200, 128, 5e-4, 0.1, 200),
    "table1-cifar100": ("cifar100", "resnet18_cifar", 200, 128, 5e-4, 0.1, 200),
    "table2-imagenet": ("imagenet_lt", "resnext50_32x4d", 90, 64, 2e-4, 0.1, 30),
    "table3-visda": ("visda_c", "resnet101", 15, 40, 1e-3, 1e-3, 15),
    "table4-officehome": ("office_home:clipart", "resnet50", 50, 40, 1e-3, 1e-2, 50),
    "table5-domainnet": ("domainnet:clipart", "resnet50", 20, 40, 1e-3, 1e-2, 20),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_trainings_are_the_papers(name):
    model = load_table(name).cells("paper", 1, {"row": ["TENT+Ours"]})[0].model
    names = ("dataset", "architecture", "epochs", "batch_size", "weight_decay", "lr")
    assert (*(model.source[n] for n in names), model.adapter["epochs"]) == TRAININGS[name]
    assert (model.source["momentum"], model.adapter["lr"]) == (0.9, 1e-3)
    assert model.source["strategy"] == "balanced_softmax"
    assert model.adapter["batch_size"] == model.source["batch_size"]
    assert model.adapter["weight_decay"] == model.source["weight_decay"]


@pytest.mark.parametrize("name", ["table3-visda", "table4-officehome", "table5-domainnet"])
def test_data_that_are_not_there_are_refused_by_the_data_room(name, tmp_path):
    cell = load_table(name).cells("paper", 1)[0]
    for dataset in (cell.target, cell.model.source["dataset"]):
        with pytest.raises(TwoshiftError):
            load(dataset, root=tmp_path)


def test_changes_of_recipes():
    parts = load_table("table10-parts")
    (cell,) = parts.cells("cpu", 1, {"row": ["db"], **ONE})
    changed = {"gamma": False, "beta": False, "dw": "none"}
    assert cell.model.adapter["adapter"] == {
        "condition": "scalar",
        "lambdas": [1, 0, -2],
        **changed,
    }
    points = load_table("table12-points")
    drawn = {
        r: points.cells("cpu", 1, {"row": [r], **ONE})[0].model.adapter["points"] for r in "357"
    }
    assert drawn == {"3": 3, "5": 5, "7": 7}
    assert points.cells("cpu", 1, {"row": ["inf"]})[0].model.adapter["points"] == 0
    source = load_table("table11-source")
    only = {"row": ["NOTE"], **ONE}
    trained = [c.model.source["strategy"] for c in source.cells("cpu", 1, only)]
    assert trained == ["cross_entropy", "balanced_sampling", "classifier_retraining"]
    sar = load_table("table14-sar").cells("cpu", 1, {"method": ["sar"], **ONE})
    assert [c.model.source["settings"]["norm"] for c in sar] == ["gn", "bn", "gn", "bn"]


def test_a_group_without_the_profile_is_left_out():
    prior = load_table("table6-prior")
    found = {p: {prior.row_of(c).partition(":")[0] for c in prior.cells(p, 1, ONE)} for p in BOTH}
    small = {"CIFAR-10-C", "CIFAR-100-C"}
    assert found == {"cpu": small, "paper": small | {"ImageNet-C"}}


def test_order_keeps_images_and_seeds_together(table):
    cells = table.cells("cpu", seeds=2)
    blocks = [k for k, _ in itertools.groupby((c.seed, c.corruption) for c in cells)]
    assert blocks == list(itertools.product((0, 1), BENCHMARK))
    first = [c for c in cells if (c.seed, c.corruption) == (0, "gaussian_noise")]
    rows = [k for k, _ in itertools.groupby(table.row_of(c) for c in first)]
    assert tuple(rows) == table.rows


FILTERS = [
    ({"method": ["tent"]}, lambda c: c.method == "tent"),
    ({"method": ["tent", "iabn"]}, lambda c: c.method in ("tent", "iabn")),
    ({"corruption": ["fog"]}, lambda c: c.corruption == "fog"),
    ({"labels": ["uniform", "backward-50"]}, lambda c: c.labels in ("uniform", "backward-50")),
    ({"column": ["uniform"]}, lambda c: c.labels == "uniform"),
    ({"estimator": ["oracle"]}, lambda c: c.estimator == "oracle"),
    ({"estimator": ["ema"]}, lambda c: c.estimator == "ema" and c.adapter is not None),
    ({"norm": ["iabn"]}, lambda c: c.model.source["settings"]["norm"] == "iabn"),
    ({"adapter": ["identity"]}, lambda c: c.adapter == "identity"),
    ({"adapter": ["none"]}, lambda c: c.adapter is None),
    (
        {"method": ["tent"], "labels": ["uniform"]},
        lambda c: (c.method, c.labels) == ("tent", "uniform"),
    ),
    ({"method": "tent"}, lambda c: c.method == "tent"),
]


@pytest.mark.parametrize(("only", "wanted"), FILTERS)
def test_only(table, only, wanted):
    found = table.cells("cpu", only=only)
    assert found == [cell for cell in table.cells("cpu") if wanted(cell)]
    assert found


def test_only_by_row_and_group():
    table = load_table("table14-sar")
    both = table.cells("cpu", 1, {"row": ["SAR+GN"], **ONE})
    assert [table.row_of(c) for c in both] == ["CIFAR-10-C: SAR+GN", "CIFAR-100-C: SAR+GN"]
    assert table.cells("cpu", 1, {"row": ["CIFAR-100-C: SAR+GN"], **ONE}) == both[1:]
    assert table.cells("cpu", 1, {"row": ["SAR+GN"], "group": ["CIFAR-10-C"], **ONE}) == both[:1]


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ({"metod": ["tent"]}, "cannot choose by 'metod'. Did you mean 'method'"),
        ({"method": ["tend"]}, "no method 'tend' in table1-cifar10. Did you mean 'tent'"),
        ({"method": ["sar"]}, "no method 'sar' in table1-cifar10"),
        ({"corruption": ["gausian_noise"]}, "Did you mean 'gaussian_noise'"),
        ({"labels": ["forward-100"]}, "no labels 'forward-100'"),
        ({"method": ["tent"], "norm": ["iabn"]}, "no cell of table1-cifar10 matches all of"),
    ],
)
def test_only_what_is_there(table, only, message):
    with pytest.raises(TwoshiftError, match=message):
        table.cells("cpu", only=only)


def test_the_packaged_benchmarks_are_known_by_presets():
    content = yaml.safe_load((yaml_folder() / "_benchmarks.yaml").read_text())
    of_benchmarks = {name for name in presets.names() if not presets.combination(name)}
    assert {b["preset"] for b in content.values() if "preset" in b} == of_benchmarks
    assert set(content) - set(presets.names()) == {
        "cifar10-ablation",
        "cifar10-beyond",
        "cifar10-finals",
        "cifar10-mild",
        "cifar10-selection",
        "demo",
        "digits",
    }


@pytest.mark.parametrize("name", table_names())
def test_every_row_says_what_it_freezes(name):
    for plan in itertools.chain(*load_table(name).plans.values()):
        frozen, content = plan.base.settings.get("freeze"), plan.content
        assert frozen == content.freeze, content.name
        if content.adapter == "logit" and "frozen" not in content.name:
            assert frozen is None, content.name
