import pytest

from twoshift.errors import SettingError, UnknownName
from twoshift.train.recipes import AdapterRecipe, SourceRecipe, load_recipe, recipe_names

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
        ("schedule: linear", r"'schedule'.*'cosine', 'one_cycle' or 'constant'"),
        ("settings: 3", r"'settings'.*dictionary"),
        ("- epochs", "a mapping, got list"),
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
