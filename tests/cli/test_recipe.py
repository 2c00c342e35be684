from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from twoshift.bench import presets
from twoshift.bench.plan import benchmarks
from twoshift.cli.recipe import app
from twoshift.errors import UnknownName
from twoshift.train.recipes import AdapterRecipe, SourceRecipe, load_recipe, recipe_names

KINDS = {"source": SourceRecipe, "adapter": AdapterRecipe}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception:
        raise result.exception
    return result.stdout


@pytest.mark.parametrize("name", benchmarks())
def test_every_benchmark_and_recipe_is_shown_alike_as_yaml_and_json(name):
    shown = yaml.safe_load(run("show", name))
    assert shown == json.loads(run("show", name, "--json"))
    assert {"source", "adapter", "test_time"} <= shown.keys()
    for stage, kind in KINDS.items():
        assert kind.model_validate(shown[stage]).model_dump() == shown[stage]


def test_a_recipe_for_source_models_only_has_no_stage_of_an_adapter():
    shown = yaml.safe_load(run("show", "cifar-vit-cpu"))
    assert shown["source"] == load_recipe(SourceRecipe, "cifar-vit-cpu").model_dump()
    assert shown.keys() == {"source", "test_time"}
    with pytest.raises(UnknownName, match=r"stage 'adapter'\. Known: source, test_time"):
        run("show", "cifar-vit-cpu", "--stage", "adapter")


@pytest.mark.parametrize("stage", KINDS)
def test_a_stage_is_a_recipe_that_can_be_given_back(tmp_path, stage):
    text = run("show", "visda-c", "--stage", stage)
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert load_recipe(KINDS[stage], path) == load_recipe(KINDS[stage], "visda-c")
    path.write_text(text.replace("epochs: 15", "epochs: 3"))
    assert load_recipe(KINDS[stage], path).epochs == 3


def test_what_the_paper_says_of_imagenet():
    shown = yaml.safe_load(run("show", "imagenet-c"))
    assert shown["source"]["milestones"] == [60, 80]
    assert shown["streams"]["severity"] == 3
    test_time = shown["test_time"]
    assert test_time["methods"]["tent"] == {"lr": 2.5e-4, "optim": "sgd"}
    assert test_time["with_adapter"] == {"freeze": ["layer4"], "correction": "none"}
    assert test_time["estimators"] == {"ema": {"top_k": 3}}
    other = yaml.safe_load(run("show", "visda-c"))["test_time"]
    assert other["with_adapter"] == {"correction": "none"}


@pytest.mark.parametrize("name", [name for name, b in benchmarks().items() if b.preset])
def test_test_time_settings_are_all_of_the_preset(name):
    shown, preset = (
        yaml.safe_load(run("show", name, "--stage", "test_time")),
        benchmarks()[name].preset,
    )
    for method, settings in shown["methods"].items():
        assert settings == presets.preset(preset, method, with_adapter=False)
        both = {**settings, **shown.get("with_iabn", {}).get(method, {})}
        assert both == presets.preset(preset, method, with_adapter=False, with_iabn=True)
    assert {"tent", "iabn", "note", "cotta", "lame"} <= shown["methods"].keys()


def test_profiles():
    assert yaml.safe_load(run("show", "cifar10-c"))["source"]["epochs"] == 200
    cpu = yaml.safe_load(run("show", "cifar10-c", "--profile", "cpu"))
    assert cpu["source"] == load_recipe(SourceRecipe, "cifar-cpu").model_dump()
    with pytest.raises(UnknownName, match=r"no profile 'cup'\. Did you mean 'cpu'"):
        run("show", "cifar10-c", "--profile", "cup")


def test_a_wrong_name_is_answered_with_a_hint():
    with pytest.raises(UnknownName, match=r"'visda'\. Did you mean 'visda-c'"):
        run("show", "visda")


def test_the_list_has_all_of_them():
    rows = json.loads(run("ls", "--json"))
    named = {row["name"] for row in rows}
    assert named >= {*benchmarks(), "pacs", "cifar-vit-cpu", "cifar-convnext-cpu"}
    assert {"cifar", "cifar-cpu"} - named == {"cifar", "cifar-cpu"}  # parts of the benchmarks
    visda = next(row for row in rows if row["name"] == "visda-c")
    wanted = {"profile": "paper", "dataset": "visda_c", "architecture": "resnet101", "epochs": 15}
    assert visda == {"name": "visda-c", **wanted}
    table = run("ls")
    assert all(row["name"] in table for row in rows)
    assert named <= {*benchmarks(), *recipe_names(SourceRecipe)}
