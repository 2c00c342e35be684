import copy

import numpy as np
import pytest
import torch

from tests.train import toy
from twoshift import models
from twoshift.data import load
from twoshift.data.long_tail import long_tailed_indices
from twoshift.data.stream import to_float
from twoshift.errors import CheckpointError, SettingError, StorageError, UnknownName
from twoshift.models.head import find_head
from twoshift.storage import saved_files
from twoshift.train import loop
from twoshift.train import source as source_module
from twoshift.train.checkpoint import load_source
from twoshift.train.recipes import SourceRecipe
from twoshift.train.source import train_source

STRATEGIES = ["balanced_softmax", "cross_entropy", "balanced_sampling", "classifier_retraining"]


def unseen():
    data = load(toy.DATA, "test")
    return to_float(data.images), torch.from_numpy(data.labels)


def balanced_accuracy(model):
    x, y = unseen()
    with torch.no_grad():
        hits = model(x).argmax(1) == y
    return np.mean([hits[y == c].float().mean().item() for c in range(toy.CLASSES)])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_and_its_card_says_so(tmp_path, strategy):
    reports = []
    recipe = toy.source_recipe(strategy=strategy)
    source = train_source(
        recipe,
        tmp_path / "m",
        seed=3,
        progress=lambda done, total, facts: reports.append((done, total)),
    )
    epochs = 5 if strategy == "classifier_retraining" else 3
    assert reports == [(i + 1, epochs) for i in range(epochs)]
    card = source.card
    assert (card.strategy, card.seed, card.dataset) == (strategy, 3, toy.DATA)
    assert card.class_counts == toy.COUNTS
    assert card.classes == ["a", "b", "c", "d"]
    assert SourceRecipe(**card.recipe) == recipe
    assert card.prior.tolist() == pytest.approx([c / 212 for c in toy.COUNTS])
    assert not source.model.training
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]
    weights = saved_files(tmp_path / "m")["model"].name
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["card.json", weights]


def test_balanced_softmax_learns(source_folder):
    source = load_source(source_folder)
    accuracy = balanced_accuracy(source.model)
    assert accuracy > 0.6  # chance is 0.25
    measured = source.card.measured
    assert measured["held_out"] == 4 * toy.PER_CLASS - sum(toy.COUNTS)
    assert 0.5 < measured["balanced_accuracy_held_out"] <= 1


def test_the_held_out_measure_is_balanced_accuracy_outside_the_subset(source_folder):
    source = load_source(source_folder)
    data = load(toy.DATA, "train")
    inside = set(long_tailed_indices(data.labels, 10).tolist())
    hits = {}
    for i in sorted(set(range(len(data))) - inside):
        with torch.no_grad():
            predicted = source.model(to_float(data.images[i : i + 1])).argmax().item()
        hits.setdefault(int(data.labels[i]), []).append(predicted == data.labels[i])
    expected = np.mean([np.mean(h) for h in hits.values()])
    assert source.card.measured["balanced_accuracy_held_out"] == pytest.approx(expected, abs=0.02)


def test_without_a_tail_nothing_is_held_out(tmp_path):
    source = train_source(toy.source_recipe(ratio=1, epochs=1), tmp_path / "m")
    assert source.card.measured == {}
    assert source.card.class_counts == [toy.PER_CLASS] * 4


def test_normalisation_is_that_of_the_training_images(source_folder):
    source = load_source(source_folder)
    data = load(toy.DATA, "train")
    images = data.images[long_tailed_indices(data.labels, 10)] / 255
    for channel in range(3):
        pixels = images[..., channel].ravel()
        assert source.card.settings["mean"][channel] == pytest.approx(pixels.mean(), abs=1e-4)
        assert source.card.settings["std"][channel] == pytest.approx(pixels.std(), abs=1e-4)
    built = source.model.normalize
    assert built.mean.flatten().tolist() == pytest.approx(source.card.settings["mean"])
    assert built.std.flatten().tolist() == pytest.approx(source.card.settings["std"])


def test_a_given_normalisation_is_kept(tmp_path):
    normalisation = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    card = train_source(toy.source_recipe(epochs=1, settings=normalisation), tmp_path / "m").card
    assert {k: card.settings[k] for k in normalisation} == normalisation


@pytest.mark.parametrize("setting", ["mean", "std"])
def test_half_a_normalisation_is_refused(tmp_path, setting):
    recipe = toy.source_recipe(epochs=1, settings={setting: [0.1, 0.2, 0.3]})
    with pytest.raises(SettingError, match=r"settings\.mean and settings\.std, must be both set"):
        train_source(recipe, tmp_path / "m")


def test_loading_gives_the_same_logits(tmp_path):
    source = train_source(toy.source_recipe(), tmp_path / "m")
    again = load_source(tmp_path / "m")
    x, _ = unseen()
    torch.testing.assert_close(again.model(x), source.model(x), rtol=0, atol=0)
    assert again.card == source.card
    assert again.weights == source.weights


def test_seeds_decide_the_weights(tmp_path):
    runs = [
        train_source(toy.source_recipe(epochs=1), tmp_path / str(i), seed=i // 2) for i in range(3)
    ]
    first, same, other = (run.weights for run in runs)
    assert first == same != other


def test_only_the_seed_decides_not_the_callers_randomness(tmp_path):
    weights = []
    for i in range(2):
        torch.manual_seed(i)
        np.random.seed(i)
        recipe = toy.source_recipe(epochs=1, strategy="classifier_retraining")
        weights.append(train_source(recipe, tmp_path / str(i)).weights)
    assert weights[0] == weights[1]


# -- classifier re-training -------------------------------------------------------------------


def test_retraining_the_classifier_leaves_the_features_bit_equal(tmp_path):
    phase_one = train_source(toy.source_recipe(strategy="cross_entropy"), tmp_path / "one").model
    both = train_source(toy.source_recipe(strategy="classifier_retraining"), tmp_path / "two").model
    head = find_head(both)[0]
    for name, value in both.state_dict().items():
        same = torch.equal(value, phase_one.state_dict()[name])
        assert same != name.startswith(f"{head}."), name


def test_retraining_starts_from_a_fresh_head_and_draws_balanced(tmp_path, monkeypatch):
    starts, draws = [], []
    real_epoch, real_batches = loop.run_epoch, loop.shuffled_batches

    def run_epoch(accelerator, module, optimiser, *rest):
        starts.append((copy.deepcopy(module.fc.weight.data), module.training, len(optimiser.state)))
        return real_epoch(accelerator, module, optimiser, *rest)

    def shuffled_batches(labels, size, rng, balanced, *rest):
        draws.append(balanced)
        return real_batches(labels, size, rng, balanced, *rest)

    monkeypatch.setattr(loop, "run_epoch", run_epoch)
    monkeypatch.setattr(loop, "shuffled_batches", shuffled_batches)
    train_source(toy.source_recipe(strategy="classifier_retraining"), tmp_path / "m")
    assert draws == [False, False, False, True, True]
    assert [training for _, training, _ in starts] == [True, True, True, False, False]
    fresh = starts[3][0]
    assert fresh.abs().max() <= 16**-0.5  # drawn as for a new linear layer
    assert not torch.allclose(fresh, starts[2][0], atol=0.01)
    assert starts[3][2] == 0  # no momentum from the first phase


def test_balanced_sampling_is_balanced_from_the_start(tmp_path, monkeypatch):
    draws = []
    real = loop.shuffled_batches

    def shuffled_batches(labels, size, rng, balanced, *rest):
        draws.append(balanced)
        return real(labels, size, rng, balanced, *rest)

    monkeypatch.setattr(loop, "shuffled_batches", shuffled_batches)
    train_source(toy.source_recipe(epochs=2, strategy="balanced_sampling"), tmp_path / "m")
    assert draws == [True, True]


def test_only_balanced_softmax_is_given_the_prior(tmp_path, monkeypatch):
    priors = []
    real = source_module.balanced_softmax

    def balanced_softmax(logits, labels, log_prior):
        priors.append(log_prior)
        return real(logits, labels, log_prior)

    monkeypatch.setattr(source_module, "balanced_softmax", balanced_softmax)
    train_source(toy.source_recipe(epochs=1, strategy="cross_entropy"), tmp_path / "ce")
    assert priors == []
    train_source(toy.source_recipe(epochs=1), tmp_path / "bs")
    torch.testing.assert_close(priors[0].exp(), torch.tensor(toy.COUNTS) / 212)


# -- folders ----------------------------------------------------------------------------------


def test_a_finished_folder_is_returned_at_once(tmp_path, monkeypatch):
    recipe = toy.source_recipe(epochs=1)
    first = train_source(recipe, tmp_path / "m")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "m").iterdir()}
    monkeypatch.setattr(loop, "run_epoch", lambda *_: pytest.fail("trained again"))
    again = train_source(recipe, tmp_path / "m")
    assert again.weights == first.weights
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "m").iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "seed", "named"),
    [({"lr": 0.07}, 0, "recipe.lr"), ({"settings": {"std": [1, 1, 1]}}, 0, "std"), ({}, 1, "seed")],
)
def test_another_training_in_a_finished_folder_is_refused(source_folder, changes, seed, named):
    recipe = toy.source_recipe(**{"epochs": 8, "lr": 0.1, **changes})
    with pytest.raises(CheckpointError, match=named):
        train_source(recipe, source_folder, seed=seed)


class Interrupted(Exception):
    pass


def interrupt(after):
    def progress(done, total, facts):
        if done == after:
            raise Interrupted

    return progress


def test_another_training_in_a_begun_folder_is_refused(tmp_path):
    with pytest.raises(Interrupted):
        train_source(toy.source_recipe(), tmp_path / "m", progress=interrupt(1))
    with pytest.raises(CheckpointError, match=r"recipe\.batch_size"):
        train_source(toy.source_recipe(batch_size=8), tmp_path / "m")


def test_an_unfinished_folder_is_no_source_model(tmp_path):
    with pytest.raises(Interrupted):
        train_source(toy.source_recipe(), tmp_path / "m", progress=interrupt(2))
    with pytest.raises(CheckpointError, match="no source model"):
        load_source(tmp_path / "m")


def test_a_damaged_state_is_refused(tmp_path):
    with pytest.raises(Interrupted):
        train_source(toy.source_recipe(), tmp_path / "m", progress=interrupt(1))
    state = saved_files(tmp_path / "m" / ".training")["state"]
    state.write_bytes(state.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"state-\w+\.safetensors is truncated or edited"):
        train_source(toy.source_recipe(), tmp_path / "m")


def test_a_folder_that_cannot_take_the_result_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        train_source(
            toy.source_recipe(), tmp_path / "file/m", progress=lambda *_: pytest.fail("trained")
        )


def test_other_files_in_the_folder_stay(tmp_path):
    (tmp_path / "photos.zip").write_text("mine")
    train_source(toy.source_recipe(epochs=1), tmp_path)
    names = sorted(f.name for f in tmp_path.iterdir())
    assert names == ["card.json", saved_files(tmp_path)["model"].name, "photos.zip"]
    assert (tmp_path / "photos.zip").read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dataset": "tyo"}, UnknownName, "Did you mean 'toy'"),
        ({"architecture": "toy_nte"}, UnknownName, "Did you mean 'toy_net'"),
        ({"settings": {"wdith": 3}}, SettingError, "no setting 'wdith'"),
    ],
)
def test_wrong_names_are_answered_with_a_hint(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        train_source(toy.source_recipe(**changes), tmp_path / "m")


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["bn", "iabn", "gn"])
def test_the_real_backbone_trains(tmp_path, norm):
    # 16 channels: see ToyNet for what happens with fewer
    recipe = toy.source_recipe(
        architecture="resnet18_cifar", settings={"width": 16, "norm": norm}, epochs=2
    )
    source = train_source(recipe, tmp_path / "m")
    assert source.card.settings["norm"] == norm
    fresh = models.create("resnet18_cifar", **source.card.settings)
    assert not torch.equal(fresh.fc.weight, source.model.fc.weight)
    assert torch.isfinite(source.model(unseen()[0])).all()
