import json
import os

import pytest

from twoshift import models
from twoshift.bench.table import load_table
from twoshift.data import datasets
from twoshift.errors import SettingError, StorageError, UnknownName
from twoshift.registry import check_settings
from twoshift.train.recipes import AdapterRecipe, SourceRecipe, load_recipe, recipe_names

LAUGHS = "settings:\n  a0: &a0 [1, 2]\n" + "".join(
    f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
KINDS = {"source": SourceRecipe, "adapter": AdapterRecipe}
PACKAGED = [(kind, name) for kind, cls in KINDS.items() for name in recipe_names(cls)]


@pytest.mark.parametrize(("kind", "name"), PACKAGED)
def test_every_packaged_recipe_loads_and_opens_with_its_command(kind, name):
    assert isinstance(load_recipe(KINDS[kind], name), KINDS[kind])
    opening = recipe_names(KINDS[kind])[name].read_text().splitlines()[0]
    assert opening.startswith(f"# twoshift train {kind} ")
    assert f"--recipe {name} " in opening


def test_there_are_recipes_of_both_kinds():
    assert {"cifar", "cifar-cpu"} <= set(recipe_names(SourceRecipe))
    assert {"cifar", "cifar-cpu"} <= set(recipe_names(AdapterRecipe))


def test_the_paper_recipe_is_the_papers():
    source, adapter = load_recipe(SourceRecipe, "cifar"), load_recipe(AdapterRecipe, "cifar")
    for recipe, lr in ((source, 0.1), (adapter, 1e-3)):
        assert recipe.lr == lr
        assert (recipe.momentum, recipe.nesterov, recipe.weight_decay) == (0.9, True, 5e-4)
        assert (recipe.epochs, recipe.batch_size, recipe.schedule) == (200, 128, "cosine")
        assert recipe.augment == "crop_flip"
    assert (source.dataset, source.ratio, source.profile) == ("cifar10", 100, "exponential")
    assert (source.strategy, source.settings["width"]) == ("balanced_softmax", 64)
    assert (adapter.points, adapter.views) == (3, 0)
    assert adapter.adapter == {"dw": "class", "condition": "scalar", "lambdas": [1, 0, -2]}


# supplementary, table of hyper-parameters, A.2 and A.3; no schedule is a constant rate
PAPER = {
    "imagenet-c": ("resnext50_32x4d", "steps", 90, 64, 2e-4, 0.1, None, 30, [1, 0, -2]),
    "visda-c": ("resnet101", "constant", 15, 40, 1e-3, 1e-3, 0.1, 15, [1, 0, -2]),
    "office-home": ("resnet50", "constant", 50, 40, 1e-3, 1e-2, 0.1, 50, [1, -1, -3]),
    "domainnet": ("resnet50", "constant", 20, 40, 1e-3, 1e-2, 0.1, 20, [1, 0, -2]),
}


@pytest.mark.parametrize("name", PAPER)
def test_recipes_of_image_files_are_the_papers(name):
    source, adapter = load_recipe(SourceRecipe, name), load_recipe(AdapterRecipe, name)
    settings = (source.architecture, source.schedule, source.epochs, source.batch_size)
    settings += (source.weight_decay, source.lr, source.backbone_lr, adapter.epochs)
    assert (*settings, adapter.adapter["lambdas"]) == PAPER[name]
    assert (adapter.batch_size, adapter.weight_decay) == (source.batch_size, source.weight_decay)
    assert adapter.lr == 1e-3
    assert (source.strategy, source.ratio, source.settings["k"]) == ("balanced_softmax", 1, 8)
    assert (source.milestones == [60, 80]) == (name == "imagenet-c")
    assert (source.pretrained is None) == (name == "imagenet-c")
    assert source.decoding == {"size": 224, "frame": 256, "squash": name != "imagenet-c"}


@pytest.mark.parametrize("name", recipe_names(SourceRecipe))
def test_backbones_have_the_settings_that_recipes_give(name):
    recipe = load_recipe(SourceRecipe, name)
    check_settings(name, models.models[recipe.architecture], recipe.settings)
    loader = datasets[recipe.dataset.partition(":")[0]]
    check_settings(name, loader, recipe.decoding or {})


def test_what_was_not_chosen_is_not_in_a_dump():
    old = SourceRecipe(dataset="cifar100")
    new = {"decoding", "pretrained", "backbone_lr", "milestones"}
    assert not new & old.model_dump().keys()
    assert not new & json.loads(old.model_dump_json()).keys()
    chosen = {
        "decoding": {"size": 64},
        "pretrained": "a.pth",
        "backbone_lr": 0.5,
        "schedule": "steps",
        "milestones": [3],
    }
    dumped = SourceRecipe(**chosen).model_dump()
    assert {k: dumped[k] for k in chosen} == chosen
    assert SourceRecipe(**dumped) == SourceRecipe(**chosen)


def test_the_usual_optimizer_is_not_in_a_dump_either():
    """Cards and keys of 0.1.0 do not name it."""
    assert SourceRecipe(optimizer="sgd") == SourceRecipe()
    assert "optimizer" not in SourceRecipe(optimizer="sgd").model_dump()
    assert "optimizer" not in AdapterRecipe().model_dump()
    chosen = AdapterRecipe(optimizer="adamw", nesterov=False)
    assert chosen.model_dump()["optimizer"] == "adamw"
    assert AdapterRecipe(**chosen.model_dump()) == chosen


@pytest.mark.parametrize("name", ["cifar-vit-cpu", "cifar-convnext-cpu"])
def test_recipes_without_batch_norm_differ_from_the_usual_one_in_network_and_optimiser(name):
    usual = load_recipe(SourceRecipe, "cifar-cpu").model_dump()
    other = load_recipe(SourceRecipe, name).model_dump()
    differ = {key for key in {*usual, *other} if usual.get(key) != other.get(key)}
    assert other["optimizer"] == "adamw"
    how = {"optimizer", "lr", "nesterov", "weight_decay", "epochs", "batch_size"}
    assert differ == {"architecture", "settings"} | how


def test_keys_of_results_and_models_there_are_have_not_changed():
    cell = load_table("table1-cifar10").cells("cpu")[0]
    assert cell.key == "1bd95d857928951ac44c45f685511794"
    row = {"row": ["IABN+Ours (lambdas 1 -1.5 -3)"]}
    trained = load_table("table1-cifar10").cells("paper", only=row)[-1]
    assert trained.key == "78e5a0284d92b61fbecdc97e9f04d5de"


def test_none_takes_back_what_a_recipe_can_do_without():
    recipe = load_recipe(SourceRecipe, "visda-c", pretrained=None, backbone_lr=None, epochs=None)
    assert (recipe.pretrained, recipe.backbone_lr, recipe.epochs) == (None, None, 15)


def write(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_a_file_is_read_and_the_rest_is_default(tmp_path):
    recipe = load_recipe(SourceRecipe, write(tmp_path, "epochs: 7\nlr: 5.0e-2\n"))
    assert recipe == SourceRecipe(epochs=7, lr=0.05)
    assert load_recipe(AdapterRecipe, write(tmp_path, "")) == AdapterRecipe()


def test_changes_replace_settings_and_merge_nested_ones(tmp_path):
    path = write(tmp_path, "settings: {width: 8, norm: bn}\nepochs: 7\n")
    recipe = load_recipe(SourceRecipe, path, settings={"norm": "iabn", "k": 3}, lr=0.5, epochs=None)
    assert recipe.settings == {"width": 8, "norm": "iabn", "k": 3}
    assert (recipe.lr, recipe.epochs) == (0.5, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epohcs: 3", r"'epohcs'.*Did you mean 'epochs'\?"),
        ("epochs: 0", r"'epochs'.*greater than or equal to 1.*got 0"),
        ("epochs: many", r"'epochs'.*got many"),
        ("batch_size: 1", r"'batch_size'.*greater than or equal to 2"),
        ("lr: -1", r"'lr'.*greater than 0"),
        ("momentum: 1", r"'momentum'.*less than 1"),
        ("strategy: balanced", r"'strategy'.*'balanced_softmax'.*got balanced"),
        ("schedule: linear", r"'schedule'.*'cosine', 'one_cycle', 'constant' or 'steps'"),
        ("settings: 3", r"'settings'.*dictionary"),
        ("schedule: steps", r"recipe .*mine.yaml: .*milestones must be given with"),
        ("milestones: [3]", "milestones must be given with the schedule 'steps', and only then"),
        ("{schedule: steps, milestones: [0]}", r"'milestones.0'.*greater than or equal to 1"),
        ("decoding: {sise: 3}", r"'decoding.sise'"),
        ("decoding: {size: 0}", r"'decoding.size'.*greater than or equal to 1"),
        ("backbone_lr: 0", r"'backbone_lr'.*greater than 0"),
        ("optimizer: adam", r"'optimizer'.*'sgd' or 'adamw'.*Did you mean 'adamw'"),
        ("optimizer: adamw", "nesterov must be false with the optimizer 'adamw'"),
        ("- epochs", "a mapping of names to values, got list"),
        ("1: 2", "a mapping of names to values"),
        ("lr: .inf", r"'lr'.*finite"),
        ("lr: .nan", r"'lr'.*"),
        ("settings: {x: .nan}", "must be numbers, text, lists and groups, got Out of range"),
        ("settings: {x: 2001-01-01}", "must be numbers, text, lists and groups, got .*date"),
        ("settings: {2: 3}", r"'settings.2"),
        ("settings: {x: !!timestamp never}", "is not YAML"),
        ("settings: {x: !!python/object/apply:os.getcwd []}", "is not YAML"),
        (f"epochs: {'9' * 5000}", "is not YAML"),
        (f"settings: {'[' * 30}{']' * 30}", "at most 20 levels deep"),
        (f"settings: {'[' * 5000}", "at most 20 levels deep"),
        ("settings: &a {x: *a}", "at most 20 levels deep"),
        (LAUGHS, "at most 20,000 values, aliases written out"),
        ("# " + "x" * 2**20, "at most 1,048,576 bytes"),
        ("epochs: [1", "is not YAML"),
    ],
)
def test_a_wrong_recipe_says_what_is_wrong(tmp_path, text, message):
    with pytest.raises(SettingError, match=message):
        load_recipe(SourceRecipe, write(tmp_path, text))


@pytest.mark.parametrize("value", [4, 1, "three"])
def test_points_other_than_the_four_are_refused(tmp_path, value):
    with pytest.raises(SettingError, match=r"'points'.*0, 3, 5 or 7"):
        load_recipe(AdapterRecipe, write(tmp_path, f"points: {value}"))


def test_a_change_is_checked_like_the_file():
    with pytest.raises(SettingError, match=r"Did you mean 'weight_decay'\?"):
        load_recipe(SourceRecipe, "cifar", weight_decays=0.1)


@pytest.mark.parametrize("name", ["cifra", "nowhere/cifar.yaml"])
def test_an_unknown_recipe_is_answered_with_the_known_ones(name):
    with pytest.raises(UnknownName, match=r"cifar-cpu"):
        load_recipe(SourceRecipe, name)


def test_a_recipe_does_not_change_under_a_training():
    with pytest.raises(ValueError, match="frozen"):
        SourceRecipe().epochs = 3


def test_infinitely_many_points_are_a_continuum(tmp_path):
    assert load_recipe(AdapterRecipe, write(tmp_path, "points: inf")).points == 0
    assert load_recipe(AdapterRecipe, write(tmp_path, "points: .inf")).points == 0


@pytest.mark.parametrize("content", [b"dataset: caf\xe9", b"\xff\xfe", "lr: 1".encode("utf-16")])
def test_a_recipe_that_is_not_utf_8(tmp_path, content):
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(SettingError, match=r"mine\.yaml, must be text in UTF-8, got the byte 0x"):
        load_recipe(SourceRecipe, tmp_path / "mine.yaml")


def test_a_recipe_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    for name in ("pipe.yaml", "folder.yaml"):
        with pytest.raises(StorageError, match=f"cannot read recipe .*{name}, must be a file"):
            load_recipe(SourceRecipe, tmp_path / name)


def test_aliases_may_be_used(tmp_path):
    text = "settings: {a: &a [1, 2], b: *a}\n"
    assert load_recipe(SourceRecipe, write(tmp_path, text)).settings == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize("text", [LAUGHS, "rows: [" * 3000, "title: &a [*a]"])
def test_tables_are_read_in_the_same_way(tmp_path, text):
    with pytest.raises(SettingError, match=r"table .*mine\.yaml, must be at most"):
        load_table(write(tmp_path, text))
