import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.train import toy
from twoshift import priors
from twoshift.adapters import (
    ClasswiseAdapter,
    LabelShiftAdapter,
    attach,
    condition,
    load_adapter,
    mapping_vector,
    save_adapter,
)
from twoshift.data import load
from twoshift.data.stream import to_float
from twoshift.errors import CheckpointError, HeadError, MismatchError, SettingError
from twoshift.storage import fingerprint, saved_files
from twoshift.train import adapter as adapter_module
from twoshift.train import loop, reading
from twoshift.train.adapter import (
    between,
    fit_adapter,
    source_images,
    train_adapter,
    training_of,
)
from twoshift.train.checkpoint import load_source, save_source
from twoshift.train.recipes import AdapterRecipe

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"


@pytest.fixture
def source(source_folder):
    return load_source(source_folder)


@pytest.fixture
def images_read(source):
    """How many images went through the backbone."""
    sizes = []
    source.model.body.register_forward_hook(lambda module, args, out: sizes.append(len(args[0])))
    return lambda: sum(sizes)


@pytest.fixture
def no_training(monkeypatch):
    """A block in which nothing may be trained."""

    @contextmanager
    def block():
        with monkeypatch.context() as patch:
            patch.setattr(loop, "run_epoch", lambda *_: pytest.fail("trained"))
            yield

    return block


def prior_at(position, source, adapter):
    prior, _ = between(position, source.card.prior, adapter.lambdas)
    return torch.from_numpy(prior).float()


def unseen():
    return to_float(load(toy.DATA, "test").images)


def test_training_starts_at_the_identity(source, tmp_path, monkeypatch):
    starts = []
    real = loop.run_epoch

    def run_epoch(accelerator, module, *rest):
        if not starts:
            starts.append(attach(source.model, module))
        return real(accelerator, module, *rest)

    monkeypatch.setattr(loop, "run_epoch", run_epoch)
    adapter = train_adapter(source, toy.adapter_recipe(epochs=1), tmp_path / "a")
    with torch.no_grad():
        expected = source.model(unseen())
        for position in (1, 0.3, -1):
            condition(starts[0], prior_at(position, source, adapter))
            torch.testing.assert_close(starts[0](unseen()), expected)
        trained = attach(source.model, adapter)
        condition(trained, prior_at(1, source, adapter))
        assert (trained(unseen()) - expected).abs().max() > 0.01


@pytest.mark.parametrize("setting", ["scalar", "full"])
def test_a_trained_adapter_follows_the_label_distribution(source, tmp_path, setting):
    recipe = toy.adapter_recipe(
        epochs=15, adapter={"lambdas": [1, 0, -1], "condition": setting}, points=5
    )
    model = attach(source.model, adapter := train_adapter(source, recipe, tmp_path / "a"))
    head, degrees = [], []
    for position in (-1, -0.5, 0, 0.5, 1):
        prior = prior_at(position, source, adapter)
        condition(model, prior)
        with torch.no_grad():
            probs = model(unseen()).softmax(1).mean(0)
        head.append(float(probs[:2].sum()))
        degrees.append(float(adapter.degree(prior)))
    assert degrees == sorted(degrees)
    assert (np.diff(head) > 0).all(), head
    assert head[-1] - head[0] > 0.2


def test_classes_are_ranked_by_their_training_counts(source, tmp_path):
    adapter = train_adapter(source, toy.adapter_recipe(epochs=1), tmp_path / "a")
    torch.testing.assert_close(adapter.mapping, torch.tensor([1, 1 / 3, -1 / 3, -1]))
    torch.testing.assert_close(mapping_vector([5, 80, 1, 7]), torch.tensor([-1 / 3, 1, -1, 1 / 3]))


@pytest.mark.parametrize(
    ("augment", "views", "epochs", "passes"),
    [
        ("none", 0, 3, 1),
        ("none", 2, 3, 1),
        ("crop", 2, 5, 2),
        ("crop_flip", 8, 3, 3),  # no more than are needed
        ("crop_flip", 0, 4, 4),
    ],
)
def test_the_backbone_reads_as_often_as_there_are_views(
    source, images_read, tmp_path, augment, views, epochs, passes
):
    recipe = toy.adapter_recipe(augment=augment, views=views, epochs=epochs)
    train_adapter(source, recipe, tmp_path / "a")
    assert images_read() == passes * sum(toy.COUNTS)


def test_views_differ_and_come_back_in_turn(source, tmp_path, monkeypatch):
    used = []
    real = loop.run_epoch

    def run_epoch(accelerator, module, optimiser, loss_of, batches, rates):
        batches = list(batches)
        used.append(torch.cat([h for h, *_ in batches]).double().sum().item())
        return real(accelerator, module, optimiser, loss_of, batches, rates)

    monkeypatch.setattr(loop, "run_epoch", run_epoch)
    recipe = toy.adapter_recipe(augment="crop", views=2, epochs=4, batch_size=4)  # 212 = 53 * 4
    train_adapter(source, recipe, tmp_path / "a")
    assert used[0] == pytest.approx(used[2])
    assert used[1] == pytest.approx(used[3])
    assert abs(used[0] - used[1]) > 1e-3


def test_features_are_those_of_the_frozen_model_in_evaluation_mode(source):
    subset = source_images(source)
    head = source.model.fc
    features = adapter_module._features(source.model, head, [to_float(subset.images)])
    with torch.no_grad():
        expected = source.model(to_float(subset.images))
        torch.testing.assert_close(head(features), expected)
    assert features.shape == (212, 16)


def test_many_images_are_read_in_parts(source, tmp_path, monkeypatch):
    sizes = []
    source.model.body.register_forward_hook(lambda module, args, out: sizes.append(len(args[0])))
    whole = train_adapter(source, toy.adapter_recipe(), tmp_path / "whole")
    monkeypatch.setattr(reading, "MAX_IMAGES", 50)
    parts = train_adapter(source, toy.adapter_recipe(), tmp_path / "parts")
    assert sizes == [212, 50, 50, 50, 50, 12]
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], value, msg=name)


def test_the_source_model_is_bit_unchanged(source, tmp_path):
    before = fingerprint(source.model.state_dict())
    logits = source.model(unseen())
    train_adapter(source, toy.adapter_recipe(augment="crop_flip"), tmp_path / "a")
    assert fingerprint(source.model.state_dict()) == before
    assert torch.equal(source.model(unseen()), logits)
    assert all(p.grad is None and p.requires_grad for p in source.model.parameters())


def test_the_copy_that_is_read_is_on_the_training_device(source, monkeypatch):
    """In evaluation mode; the given model keeps its modes and its device."""
    model, seen = source.model.train(), []
    model.body[1].eval()
    before = [module.training for module in model.modules()]
    elsewhere = SimpleNamespace(device=torch.device("meta"))
    monkeypatch.setattr(adapter_module.devices, "make_accelerator", lambda: elsewhere)
    monkeypatch.setattr(adapter_module, "_fit", lambda model, *_: seen.append(model))
    fit_adapter(model, source_images(source), toy.adapter_recipe())
    (copy,) = seen
    assert not any(module.training for module in copy.modules())
    assert {p.device.type for p in copy.parameters()} == {"meta"}
    assert [module.training for module in model.modules()] == before
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def convolutional(model):
    """The same network with a 1x1 convolution as its head, before a mean over positions."""
    head = nn.Conv2d(model.fc.in_features, model.fc.out_features, 1)
    head.load_state_dict({"weight": model.fc.weight[:, :, None, None], "bias": model.fc.bias})
    return nn.Sequential(model.normalize, model.body, head, nn.AdaptiveAvgPool2d(1))


@pytest.mark.parametrize(
    "change",
    [
        nn.DataParallel,
        lambda model: torch.compile(model, backend="eager"),
        convolutional,
        lambda model: model.half(),
        lambda model: model.bfloat16(),
    ],
    ids=["parallel", "compiled", "convolution", "half", "bfloat16"],
)
def test_any_classifier_is_taken(source, change):
    """The adapter is the plain model's, but for rounding."""
    images, recipe = source_images(source), toy.adapter_recipe(epochs=1)
    expected = fit_adapter(source.model, images, recipe)
    got = fit_adapter(change(source.model), images, recipe)
    for name, tensor in got.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=0.05, atol=0.02)


def test_the_head_can_be_named(source):
    source.model.head = nn.Linear(16, 3)  # a usual name, and not used
    with pytest.raises(HeadError, match="several candidates"):
        fit_adapter(source.model, source_images(source), toy.adapter_recipe())
    recipe = toy.adapter_recipe(epochs=1)
    assert fit_adapter(source.model, source_images(source), recipe, head="fc").classes == 4


def test_a_model_with_an_adapter_is_refused(source):
    model = attach(source.model, LabelShiftAdapter(16, 4))
    with pytest.raises(HeadError, match=r"has an adapter already.*detach\(model\) first"):
        fit_adapter(model, source_images(source), toy.adapter_recipe())


@pytest.mark.parametrize("dw", ["class", "rank1", "full", "none"])
@pytest.mark.parametrize("points", [3, 0])
def test_every_form_of_dw_lowers_the_loss(source, tmp_path, dw, points):
    losses = []
    recipe = toy.adapter_recipe(epochs=6, adapter={"dw": dw, "hidden": 20}, points=points)
    adapter = train_adapter(
        source,
        recipe,
        tmp_path / "a",
        progress=lambda done, total, facts: losses.append(float(facts.removeprefix("loss "))),
    )
    assert adapter.dw == dw
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    shift = adapter(prior_at(1, source, adapter))
    if dw in ("class", "rank1"):
        assert shift.weight[0].abs().max() > 1e-4
    elif dw == "full":
        assert shift.weight.abs().max() > 1e-4
    else:
        assert shift.weight is None


@pytest.mark.parametrize("points", [0, 3, 5, 7])
def test_the_drawn_distributions_are_the_recipes(source, tmp_path, monkeypatch, points):
    drawn = []
    real = adapter_module.between

    def between(position, *rest):
        drawn.append(position)
        return real(position, *rest)

    monkeypatch.setattr(adapter_module, "between", between)
    recipe = toy.adapter_recipe(points=points, epochs=5, batch_size=8)
    train_adapter(source, recipe, tmp_path / "a")
    assert len(drawn) == 5 * 27  # one per iteration: 212 images are 27 batches of 8
    if points:
        allowed = [1 - 2 * i / (points - 1) for i in range(points)]
        assert sorted({round(p, 6) for p in drawn}) == [round(p, 6) for p in sorted(allowed)]
    else:
        assert len(set(drawn)) == len(drawn)


OLD_SPELLING = {"condition": "classwise", "gamma": False, "beta": False, "lambdas": [1, 0, -2]}
NEW_SPELLING = {"name": "classwise"}


@pytest.mark.parametrize("spelling", [OLD_SPELLING, NEW_SPELLING], ids=["0.1.0", "today"])
def test_a_classwise_adapter_is_trained_for_any_label_distribution(
    source, tmp_path, monkeypatch, spelling
):
    drawn, margins = [], []
    anywhere, loss = priors.anywhere, adapter_module.adjusted_loss

    def draw(prior, rng):
        assert prior == pytest.approx(source.card.prior)
        drawn.append(anywhere(prior, rng))
        return drawn[-1]

    def adjusted_loss(logits, labels, margin):
        margins.append(margin)
        return loss(logits, labels, margin)

    monkeypatch.setattr(priors, "anywhere", draw)
    monkeypatch.setattr(adapter_module, "adjusted_loss", adjusted_loss)
    recipe = toy.adapter_recipe(epochs=2, batch_size=32, adapter=spelling)
    adapter = train_adapter(source, recipe, tmp_path / "a")
    assert isinstance(adapter, ClasswiseAdapter)
    assert len(drawn) == len(margins) == 2 * 7
    for prior, margin in zip(drawn, margins, strict=True):
        expected = np.log(source.card.prior) - np.log(np.maximum(prior, 1e-6))
        np.testing.assert_allclose(margin, expected, atol=1e-4)


def test_two_spellings_of_an_adapter_are_one_job(source, tmp_path, no_training):
    old, new = (toy.adapter_recipe(epochs=1, adapter=s) for s in (OLD_SPELLING, NEW_SPELLING))
    assert old == new
    first = train_adapter(source, old, tmp_path / "a")
    with no_training():
        again = train_adapter(source, new, tmp_path / "a")
    assert first.fingerprint() == again.fingerprint()


@pytest.mark.parametrize("norm", ["bn", "iabn"])
@pytest.mark.parametrize("respelt", [False, True])
def test_a_finished_adapter_of_0_1_0_is_found_again(no_training, norm, respelt):
    folder = CHECKPOINTS / f"cifar10-{norm}-adapter-classwise"
    card = json.loads((folder / "card.json").read_text())
    recipe = dict(card["training"]["recipe"])
    assert recipe["adapter"]["condition"] == "classwise"
    if respelt:
        recipe["adapter"] = {"name": "classwise", "dw": "class"}
    model = load_source(CHECKPOINTS / f"cifar10-{norm}")
    with no_training():
        adapter = train_adapter(model, AdapterRecipe.model_validate(recipe), folder)
    assert isinstance(adapter, ClasswiseAdapter)
    assert adapter.trained_for == model.weights
    recipe["adapter"] = {"name": "classwise", "dw": "class", "hidden": 5}
    with pytest.raises(CheckpointError, match=r"recipe\.adapter\.hidden"):
        train_adapter(model, AdapterRecipe.model_validate(recipe), folder)


def test_the_training_of_a_card(source):
    assert training_of({"kind": "adapter"}) is None
    job = {"recipe": {"adapter": OLD_SPELLING}, "seed": 3, "source": source.weights}
    expected = {**job, "recipe": AdapterRecipe(adapter=NEW_SPELLING).model_dump()}
    assert training_of({"training": job}) == expected
    later = {**job, "recipe": {"unheard_of": 1}}  # another version must not stop a search
    assert training_of({"training": later}) == later


@pytest.mark.parametrize("name", ["identity", "logit", "calibrated"])
def test_an_adapter_that_needs_no_training_is_refused(source, name):
    recipe = toy.adapter_recipe(adapter={"name": name})
    message = rf"must be 'classwise' or 'label_shift', got '{name}'.*--adapter {name}"
    with pytest.raises(SettingError, match=message):
        fit_adapter(source.model, source_images(source), recipe)


def test_the_saved_adapter_carries_mapping_lambdas_and_training(source, tmp_path):
    recipe = toy.adapter_recipe(adapter={"lambdas": [1, -0.5, -3], "hidden": 8})
    adapter = train_adapter(source, recipe, tmp_path / "a", seed=4)
    again = load_adapter(tmp_path / "a")
    assert again.lambdas == (1, -0.5, -3)
    assert torch.equal(again.mapping, mapping_vector(toy.COUNTS))
    assert fingerprint(again.state_dict()) == fingerprint(adapter.state_dict())
    assert "mapping" in again.state_dict()
    card = json.loads((tmp_path / "a" / "card.json").read_text())
    assert card["settings"]["lambdas"] == [1, -0.5, -3]
    assert card["settings"]["class_counts"] == toy.COUNTS
    assert card["training"]["source"] == source.weights
    assert card["training"]["seed"] == 4


def test_a_finished_adapter_is_returned_at_once_and_another_refused(source, tmp_path, no_training):
    first = train_adapter(source, toy.adapter_recipe(), tmp_path / "a")
    with no_training():
        again = train_adapter(source, toy.adapter_recipe(), tmp_path / "a")
    assert fingerprint(first.state_dict()) == fingerprint(again.state_dict())
    with pytest.raises(CheckpointError, match=r"recipe\.points"):
        train_adapter(source, toy.adapter_recipe(points=5), tmp_path / "a")
    with torch.no_grad():
        source.model.fc.bias.add_(1)
    save_source(tmp_path / "other", source.model, source.card)
    with pytest.raises(CheckpointError, match=r"\(source\)"):
        train_adapter(load_source(tmp_path / "other"), toy.adapter_recipe(), tmp_path / "a")


def test_an_adapter_that_nobody_trained_here_is_not_handed_out(source, tmp_path):
    for facts in ({}, {"training": {"source": source.weights}}, {"training": {"recipe": {}}}):
        save_adapter(tmp_path / "a", LabelShiftAdapter(16, 4), facts)
        with pytest.raises(CheckpointError, match="other settings"):
            train_adapter(source, toy.adapter_recipe(), tmp_path / "a")


def test_other_files_in_the_folder_stay(source, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    train_adapter(source, toy.adapter_recipe(epochs=1), tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        saved_files(tmp_path)["adapter"].name,
        "card.json",
        "notes.txt",
    ]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_other_data_than_the_source_models_are_refused(source, tmp_path, monkeypatch):
    monkeypatch.setitem(source.card.subset, "ratio", 5)
    with pytest.raises(MismatchError, match=r"class counts.*120, 55, 25, 12"):
        train_adapter(source, toy.adapter_recipe(), tmp_path / "a")


def test_a_misspelt_adapter_setting_is_named(source, tmp_path):
    with pytest.raises(SettingError, match=r"Did you mean 'lambdas'\?"):
        train_adapter(source, toy.adapter_recipe(adapter={"lamdbas": [1, 0, -1]}), tmp_path / "a")
