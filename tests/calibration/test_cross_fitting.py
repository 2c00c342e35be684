"""Cross-fitting: twins predict what they were not trained on, and all facts come of it."""

import copy
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests.calibration.conftest import FOLDS
from tests.calibration.same import same
from tests.train import toy
from twoshift.calibration import (
    calibration_from,
    calibration_of,
    cross_fitting,
    crossfit,
    hand_out,
    known_facts,
    save_calibration,
)
from twoshift.calibration._windows import draw_windows
from twoshift.calibration.base import FOLDER, MODES
from twoshift.calibration.cross_fitting import WORK, stratified_folds
from twoshift.calibration.facts import FROM_CARD, FROM_IMAGES, FROM_PREDICTIONS, FROM_SHIFTS, fact
from twoshift.data.stream import to_float
from twoshift.errors import CheckpointError, DataError, SettingError
from twoshift.estimators.readout import fit_readout
from twoshift.methods import EATA, Matched, Streamed
from twoshift.train import loop
from twoshift.train.adapter import source_images
from twoshift.train.augment import augmented
from twoshift.train.checkpoint import load_source
from twoshift.train.recipes import SourceRecipe
from twoshift.train.source import fit_source, model_settings, new_model, train_source


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_folds_are_stratified_and_even(folds):
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2, 3], [50, 21, 7, 2]))
    place = stratified_folds(labels, folds)
    assert np.array_equal(place, stratified_folds(labels, folds))
    for rows in (labels >= 0, *(labels == c for c in range(4))):
        sizes = np.bincount(place[rows], minlength=folds)
        assert sizes.max() - sizes.min() <= 1


def test_every_image_is_predicted_by_a_model_that_has_not_seen_it(calibrated, tmp_path):
    """Again with plain loops: a twin per fold, evaluation mode, and training mode per batch."""
    subset = source_images(calibrated)
    recipe = SourceRecipe.model_validate(calibrated.card.recipe)
    place = stratified_folds(subset.labels, FOLDS)
    logits, labels = {"running": [], "batch": []}, []
    for fold in range(FOLDS):
        rest = subset.subset(np.flatnonzero(place != fold))
        twin, _ = new_model(recipe, model_settings(recipe, rest), 0, None)
        twin = fit_source(twin, recipe, rest, 0, tmp_path / str(fold), loop.silent)
        held_out = subset.subset(np.flatnonzero(place == fold))
        x = to_float(held_out.images)
        labels += held_out.labels.tolist()
        order = np.random.default_rng(0).permutation(len(x))
        assert len(x) == 106  # a batch of 64 and one of 42
        with torch.no_grad():
            logits["running"].append(twin(x))
            for layer in twin.modules():
                layer.train(isinstance(layer, nn.BatchNorm2d))
            batch = torch.empty(len(x), 4)
            batch[order[:64]], batch[order[64:]] = twin(x[order[:64]]), twin(x[order[64:]])
            logits["batch"].append(batch)
    calibration = calibration_of(calibrated)
    for mode in MODES:
        expected = calibration_from(torch.cat(logits[mode]), torch.tensor(labels))
        facts = calibration.of(mode)
        torch.testing.assert_close(facts["confusion"], expected["confusion"], atol=1e-5, rtol=0)
        torch.testing.assert_close(facts["hard_confusion"], expected["hard_confusion"])
        assert facts["temperature"] == pytest.approx(expected["temperature"], rel=1e-4)
        threshold = expected["confidence_threshold"]
        assert facts["confidence_threshold"] == pytest.approx(threshold, abs=1e-5)
    shares = calibration.running["confusion"].sum(0)
    assert shares.tolist() == pytest.approx(list(calibrated.card.prior))


def test_the_regression_of_batches_is_fitted_to_windows_normalised_as_batches(source):
    """Again with plain loops, on the source model's own images."""
    calibration = crossfit(source, folds=0)
    subset, rng = source_images(source), np.random.default_rng(0)
    model = copy.deepcopy(source.model)
    for layer in model.modules():
        layer.train(isinstance(layer, nn.BatchNorm2d))
    means, shares = [], []
    for rows in draw_windows(subset.labels, 4, cross_fitting.WINDOWS, rng=rng):
        probs = []
        for i in range(0, len(rows), 64):
            x = to_float(augmented(subset.images, rows[i : i + 64], "crop_flip", rng))
            with torch.no_grad():
                probs += model(x).softmax(1).tolist()
        means.append(np.mean(probs, axis=0))
        shares.append([np.mean(subset.labels[rows] == c) for c in range(4)])
    expected = fit_readout(np.array(means), np.array(shares))
    torch.testing.assert_close(calibration.batch["regression"], expected, atol=1e-3, rtol=0)


def test_all_facts_are_computed_and_those_of_images_by_the_source_model(calibrated):
    calibration, images = calibration_of(calibrated), source_images(calibrated)
    for mode in MODES:
        assert getattr(calibration, mode).keys() == FROM_PREDICTIONS.keys()
    expected = {name: compute(calibrated.model, images) for name, compute in FROM_IMAGES.items()}
    assert calibration.facts.keys() == expected.keys() | FROM_SHIFTS.keys()
    assert same({name: calibration.facts[name] for name in expected}, expected)
    assert all(calibration.facts[name].isfinite().all() for name in FROM_SHIFTS)
    facts = known_facts(calibrated, "batch")
    for method in (Matched, Streamed, EATA):
        live = method(calibrated.model, **hand_out(facts, method))
        assert live(to_float(images.images[:32])).isfinite().all()


def test_the_source_model_is_not_changed(source):
    before = copy.deepcopy(source.model.state_dict())
    crossfit(source, folds=0)
    assert all(torch.equal(v, before[k]) for k, v in source.model.state_dict().items())
    assert not any(m.training for m in source.model.modules())


def test_the_same_again_does_not_train_and_other_folds_are_refused(calibrated, no_training):
    assert same(crossfit(calibrated, folds=FOLDS), calibration_of(calibrated))
    with pytest.raises(CheckpointError, match=r"other settings \(folds\)"):
        crossfit(calibrated, folds=3)


@pytest.mark.parametrize("epoch", [3, 8, 11])  # in the first fold, after it, in the second
def test_interrupted_it_goes_on(source, calibrated, epoch):
    def stop(done, total, facts):
        assert total == 8 * FOLDS
        if done == epoch:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        crossfit(source, folds=FOLDS, progress=stop)
    assert calibration_of(source) is None  # nothing half-finished counts as one
    calls = []
    calibration = crossfit(source, folds=FOLDS, progress=lambda *call: calls.append(call))
    epochs = [done for done, _, facts in calls if facts.startswith("fold")]
    last = epoch - 1 if epoch == 8 else epoch  # the state of a fold's last epoch is not saved
    # both twins once more, to predict shifted streams
    assert epochs == [*range(last + 1, 8 * FOLDS + 1), 8, 16]
    streams = [(done, total) for done, total, facts in calls if facts == "shifted streams"]
    assert streams == [(i + 1, len(streams)) for i in range(len(streams))]
    assert same(calibration, calibration_of(calibrated))
    assert not (source.folder / WORK).exists()


def test_without_folds_the_source_model_predicts_its_own_images(source, calibrated, no_training):
    calibration = crossfit(source, folds=0)
    assert (calibration.folds, calibration.held_out) == (0, False)
    assert same(calibration, calibration_of(source))
    assert calibration.running["accuracy"] > calibration_of(calibrated).running["accuracy"]


@pytest.mark.parametrize("name", list(FROM_IMAGES))
def test_a_missing_fact_of_images_is_added_without_training(calibrated, no_training, name):
    whole = calibration_of(calibrated)
    facts = {key: value for key, value in whole.facts.items() if key != name}
    save_calibration(calibrated.folder, replace(whole, facts=facts))
    assert same(crossfit(calibrated, folds=FOLDS), whole)
    assert same(calibration_of(calibrated), whole)


def test_missing_facts_of_predictions_are_added_and_the_others_stay(calibrated):
    """As in a calibration that is older than the fact."""
    whole = calibration_of(calibrated)
    batch = {key: value for key, value in whole.batch.items() if key != "regression"}
    older = replace(whole, batch={**batch, "temperature": 7.0})
    save_calibration(calibrated.folder, older)
    crossfit(calibrated, folds=FOLDS)
    assert same(
        calibration_of(calibrated), replace(whole, batch={**whole.batch, "temperature": 7.0})
    )


def test_a_network_without_a_fact_is_not_asked_for_it_again(tmp_path, monkeypatch):
    recipe = toy.source_recipe(epochs=1, settings={"norm": "gn"})
    source = train_source(recipe, tmp_path / "gn")
    calibration = crossfit(source, folds=0)
    assert calibration.facts["moments"] is None
    assert calibration.facts["fisher"].keys() == {
        f"body.{i}.{p}" for i in (1, 4) for p in ("weight", "bias")
    }
    monkeypatch.setattr(cross_fitting, "source_images", lambda *_: pytest.fail("computed again"))
    assert same(crossfit(source, folds=0), calibration)
    assert same(calibration_of(source), calibration)
    assert hand_out(known_facts(source, "running"), Matched) == {}


@pytest.fixture
def new_facts():
    """Three more facts, a function each, that are forgotten after the test."""

    @fact(FROM_CARD)
    def smallest_class(card):
        """Images of the rarest class."""
        return min(card.class_counts)

    @fact(FROM_PREDICTIONS)
    def mean_probabilities(predictions):
        """Mean probability of every class."""
        return predictions.probs.mean(0)

    @fact(FROM_IMAGES)
    def brightness(model, images):
        """Mean of all pixels."""
        return float(images.images.mean())

    yield {"smallest_class", "mean_probabilities", "brightness"}
    for table in (FROM_CARD, FROM_PREDICTIONS, FROM_IMAGES):
        for function in (smallest_class, mean_probabilities, brightness):
            table.pop(function.__name__, None)


class Reader:
    """Names all of the new facts."""

    def __init__(self, model, brightness, mean_probabilities, smallest_class=None):
        self.facts = (brightness, mean_probabilities, smallest_class)


@pytest.mark.parametrize("before", ["nothing", "a calibration without them"])
def test_a_new_fact_is_one_function(source, new_facts, before, monkeypatch):
    if before != "nothing":
        with monkeypatch.context() as patch:
            for table in (FROM_PREDICTIONS, FROM_IMAGES):
                for name in new_facts & table.keys():
                    patch.delitem(table, name)
            crossfit(source, folds=0)
        facts = known_facts(source, "running")
        with pytest.raises(SettingError, match="'brightness' of the source model, which Reader"):
            hand_out(facts, Reader)
    crossfit(source, folds=0)
    means = {}
    for mode in MODES:
        facts = known_facts(load_source(source.folder), mode)
        reader = Reader(None, **hand_out(facts, Reader))
        brightness, means[mode], smallest = reader.facts
        assert brightness == source_images(source).images.mean()
        assert smallest == min(toy.COUNTS)
        assert means[mode].tolist() == pytest.approx(facts["confusion"].sum(1).tolist(), abs=1e-6)
    assert not torch.equal(means["running"], means["batch"])


@pytest.mark.parametrize("folds", [-1, 1])
def test_a_single_fold_leaves_nothing_to_train_on(source, folds):
    with pytest.raises(SettingError, match="folds"):
        crossfit(source, folds=folds)


def test_a_model_in_memory_only_has_no_place_for_a_calibration(source):
    with pytest.raises(SettingError, match=r"must be saved.*load_source"):
        crossfit(replace(source, folder=None))


def test_a_class_of_one_image_cannot_be_held_out(source, monkeypatch):
    def without(source, data):
        subset = source_images(source, data)
        return subset.subset(np.flatnonzero(np.cumsum(subset.labels == 3) <= 1))

    monkeypatch.setattr(cross_fitting, "source_images", without)
    with pytest.raises(DataError, match=r"class 'd', must be at least two.*got 1.*folds=0"):
        crossfit(source)
    assert not (source.folder / FOLDER).exists()


def test_a_model_can_be_calibrated_where_it_was_moved_to(source, tmp_path):
    moved = load_source(shutil.copytree(source.folder, tmp_path / "moved"))
    crossfit(moved, folds=0)
    assert calibration_of(source) is None
    assert calibration_of(moved) is not None
