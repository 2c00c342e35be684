import copy
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from twoshift.train.calibration import MODES, calibration_from
from twoshift.train.crossfit import calibrate, stratified_folds
from twoshift.train.windows import draw_windows, label_shares

from tests.train import toy
from twoshift import estimators
from twoshift.data.stream import to_float
from twoshift.errors import (
    BatchError,
    CheckpointError,
    DataError,
    MismatchError,
    SettingError,
)
from twoshift.estimators._bcts import fit_bcts
from twoshift.estimators.readout import fit_readout
from twoshift.train import crossfit, loop
from twoshift.train.adapter import source_images
from twoshift.train.augment import augmented
from twoshift.train.checkpoint import load_source, save_source
from twoshift.train.recipes import SourceRecipe
from twoshift.train.source import fit_source, model_settings, new_model

FOLDS = 2


@pytest.fixture(scope="module")
def calibrated(source_folder, tmp_path_factory):
    """A calibrated source model; read it, never write to it."""
    folder = shutil.copytree(source_folder, tmp_path_factory.mktemp("calibrated") / "model")
    calibrate(load_source(folder), folder, folds=FOLDS)
    return folder


@pytest.fixture
def folder(source_folder, tmp_path):
    return shutil.copytree(source_folder, tmp_path / "model")


@pytest.fixture
def no_training(monkeypatch):
    def refuse(*_arguments, **_settings):
        raise AssertionError("trained")

    monkeypatch.setattr(loop, "run_epoch", refuse)


def equal(one, other):
    return all(
        torch.equal(getattr(one.of(mode), name), getattr(other.of(mode), name))
        for mode in MODES
        for name in ("soft", "hard", "readout")
    ) and all(
        getattr(one.of(mode), name) == getattr(other.of(mode), name)
        for mode in MODES
        for name in ("temperature", "bias", "low_confidence", "samples")
    )


def noisy_logits(n=60, classes=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    return torch.randn(n, classes, generator=g) + 2 * torch.eye(classes)[labels], labels


def test_everything_from_logits_sample_by_sample():
    logits, labels = noisy_logits()
    part = calibration_from(logits, labels)
    soft, hard, confidence = np.zeros((3, 3)), np.zeros((3, 3)), []
    for row, y in zip(logits.double().tolist(), labels.tolist(), strict=True):
        p = np.exp(row) / np.exp(row).sum()
        soft[:, y] += p / 60
        hard[p.argmax(), y] += 1 / 60
        confidence.append(p.max())
    np.testing.assert_allclose(part.soft, soft, atol=1e-7)
    np.testing.assert_allclose(part.hard, hard, atol=1e-7)
    assert (part.temperature, part.bias) == fit_bcts(logits, labels)
    assert part.samples == 60
    assert part.source_prior == pytest.approx([1 / 3] * 3)
    assert part.accuracy == pytest.approx(sum(hard[i, i] for i in range(3)))
    assert part.balanced_accuracy == pytest.approx(np.mean([3 * hard[i, i] for i in range(3)]))
    low = sorted(confidence)  # 5 % of 59 gaps is 2.95
    assert part.low_confidence == pytest.approx(0.05 * low[2] + 0.95 * low[3])
    assert part.cotta_threshold == pytest.approx(part.low_confidence - 0.05)


def test_a_threshold_is_not_negative():
    logits, labels = noisy_logits(n=100, classes=50)
    assert calibration_from(logits * 0, labels).cotta_threshold == 0


@pytest.mark.parametrize("name", list(estimators.estimators))
def test_it_knows_what_estimators_need(name):
    part = calibration_from(*noisy_logits())
    told = {"prior": [0.2, 0.3, 0.5]} if name == "oracle" else {}
    settings = json.loads(json.dumps(part.settings(name)))
    estimator = estimators.create(name, 3, **settings, **told)
    estimator.update(noisy_logits()[0].softmax(1))
    assert float(estimator.prior.sum()) == pytest.approx(1)
    assert bool(settings) == estimator.reads_unadjusted  # who models the source head must know it
    assert {k: estimator.settings()[k] for k in settings} == settings


@pytest.mark.parametrize(
    ("logits", "labels", "error"),
    [
        (torch.zeros(4), torch.zeros(4, dtype=int), BatchError),
        (torch.zeros(4, 2), torch.zeros(3, dtype=int), BatchError),
        (torch.zeros(0, 2), torch.zeros(0, dtype=int), BatchError),
        (torch.full((2, 2), torch.nan), torch.arange(2), BatchError),
        (torch.zeros(4, 2), torch.zeros(4, dtype=int), DataError),
    ],
    ids=["vector", "lengths", "empty", "nan", "absent class"],
)
def test_what_cannot_be_calibrated_on_is_refused(logits, labels, error):
    with pytest.raises(error, match="to calibrate on"):
        calibration_from(logits, labels)


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
    source = load_source(calibrated)
    subset = source_images(source)
    recipe = SourceRecipe.model_validate(source.card.recipe)
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
    for mode in MODES:
        expected = calibration_from(torch.cat(logits[mode]), torch.tensor(labels))
        part = source.calibration.of(mode)
        torch.testing.assert_close(part.soft, expected.soft, atol=1e-5, rtol=0)
        torch.testing.assert_close(part.hard, expected.hard)
        assert part.temperature == pytest.approx(expected.temperature, rel=1e-4)
        assert part.low_confidence == pytest.approx(expected.low_confidence, abs=1e-5)
    assert source.calibration.running.source_prior == pytest.approx(list(source.card.prior))


def test_the_readout_of_batches_is_fitted_to_windows_normalised_as_batches(folder):
    """Again with plain loops, on the source model's own images."""
    source = load_source(folder)
    found = calibrate(source, folder, folds=0)
    subset, rng = source_images(source), np.random.default_rng(0)
    model = copy.deepcopy(source.model)
    for layer in model.modules():
        layer.train(isinstance(layer, nn.BatchNorm2d))
    means, shares = [], []
    for rows in draw_windows(subset.labels, 4, crossfit.WINDOWS, rng):
        probs = []
        for i in range(0, len(rows), 64):
            x = to_float(augmented(subset.images, rows[i : i + 64], "crop_flip", rng))
            with torch.no_grad():
                probs += model(x).softmax(1).tolist()
        means.append(np.mean(probs, axis=0))
        shares.append([np.mean(subset.labels[rows] == c) for c in range(4)])
    expected = fit_readout(np.array(means), np.array(shares))
    torch.testing.assert_close(found.batch.readout, expected, atol=1e-3, rtol=0)


def test_windows_hold_images_of_the_classes_there_are():
    labels = np.array([0] * 50 + [1] * 5 + [3] * 2)
    drawn = draw_windows(labels, 4, 40, np.random.default_rng(0))
    assert all(rows.shape == (512,) for rows in drawn)
    shares = np.array([label_shares(labels[rows], 4) for rows in drawn])
    assert (shares[:, 2] == 0).all()
    assert (shares.max(0)[[0, 1, 3]] > 0.7).all()  # each is the most frequent one some time
    rows = np.concatenate(drawn)
    assert set(rows) == set(range(len(labels)))


def test_without_a_readout_the_estimator_is_refused(calibrated):
    old = replace(load_source(calibrated).calibration.batch, readout=None)
    with pytest.raises(SettingError, match="calibrated again"):
        old.settings("readout")


def test_it_is_kept_with_the_source_model(source_folder, calibrated):
    assert load_source(source_folder).calibration is None
    source = load_source(calibrated)
    assert (source.calibration.folds, source.calibration.held_out) == (FOLDS, True)
    assert source.calibration.source == source.weights
    assert source.calibration.fisher is None
    card = json.loads((calibrated / "calibration" / "card.json").read_text())
    assert card["kind"] == "calibration"
    assert card["batch"]["temperature"] == source.calibration.batch.temperature
    assert str(calibrated.parent) not in json.dumps(card)  # nothing of this machine
    assert sorted(p.name for p in calibrated.iterdir()) == [
        "calibration",
        "card.json",
        "model.safetensors",
    ]
    with pytest.raises(SettingError, match="running or batch"):
        source.calibration.of("both")


def test_the_source_model_is_not_changed(folder):
    source = load_source(folder)
    before = copy.deepcopy(source.model.state_dict())
    calibrate(source, folder, folds=0)
    assert all(torch.equal(v, before[k]) for k, v in source.model.state_dict().items())
    assert not source.model.training
    assert not any(m.training for m in source.model.modules())


def test_the_same_again_does_not_train_and_other_folds_are_refused(calibrated, no_training):
    source = load_source(calibrated)
    assert equal(calibrate(source, calibrated, folds=FOLDS), source.calibration)
    with pytest.raises(CheckpointError, match=r"other settings \(folds\)"):
        calibrate(source, calibrated, folds=3)


@pytest.mark.parametrize("epoch", [3, 8, 11])  # in the first fold, after it, in the second
def test_interrupted_it_goes_on(folder, calibrated, epoch):
    def stop(done, total, facts):
        assert total == 8 * FOLDS
        seen.append(done)
        if done == epoch:
            raise KeyboardInterrupt

    seen = []
    with pytest.raises(KeyboardInterrupt):
        calibrate(load_source(folder), folder, folds=FOLDS, progress=stop)
    assert load_source(folder).calibration is None  # nothing half-finished is taken for it
    seen = []
    found = calibrate(
        load_source(folder), folder, folds=FOLDS, progress=lambda done, *_: seen.append(done)
    )
    last = epoch - 1 if epoch == 8 else epoch  # the state of a fold's last epoch is not kept
    assert seen == list(range(last + 1, 8 * FOLDS + 1))
    assert equal(found, load_source(calibrated).calibration)
    assert not (folder / crossfit.WORK).exists()


def test_without_folds_it_is_the_source_model_on_its_own_images(folder, calibrated, no_training):
    found = calibrate(load_source(folder), folder, folds=0)
    assert (found.folds, found.held_out) == (0, False)
    assert equal(found, load_source(folder).calibration)
    assert found.running.accuracy > load_source(calibrated).calibration.running.accuracy


def test_the_fisher_information_is_handed_in_and_can_come_later(folder):
    def fisher(model, batches):
        sizes = [len(x) for x in batches]
        assert sum(sizes) == sum(toy.COUNTS)
        assert isinstance(model, toy.ToyNet)
        return {"body.1.weight": [float(s) for s in sizes]}

    source = load_source(folder)
    first = calibrate(source, folder, folds=0)
    assert first.fisher is None
    second = calibrate(source, folder, folds=0, fisher=fisher)
    assert second.fisher == {"body.1.weight": [64, 64, 84]}
    assert equal(first, second)
    again = load_source(folder).calibration
    assert again.fisher == second.fisher
    assert calibrate(source, folder, folds=0, fisher=None).fisher == second.fisher


def test_so_are_the_moments_of_each_class(folder):
    def moments(model, batches):
        labels = np.concatenate([y.numpy() for x, y in batches if len(x) == len(y)])
        assert np.bincount(labels).tolist() == toy.COUNTS
        return {"body.1": [[[0.5]], [[float(len(labels))]]]}

    source = load_source(folder)
    assert calibrate(source, folder, folds=0).moments is None
    second = calibrate(source, folder, folds=0, moments=moments)
    assert second.moments == {"body.1": [[[0.5]], [[sum(toy.COUNTS)]]]}
    assert load_source(folder).calibration.moments == second.moments
    assert calibrate(source, folder, folds=0, fisher=None).moments == second.moments


@pytest.mark.parametrize("folds", [-1, 1])
def test_a_single_fold_leaves_nothing_to_train_on(folder, folds):
    with pytest.raises(SettingError, match="folds"):
        calibrate(load_source(folder), folder, folds=folds)


def test_a_class_of_one_image_cannot_be_held_out(folder, monkeypatch):
    def without(source, data):
        subset = source_images(source, data)
        return subset.subset(np.flatnonzero(np.cumsum(subset.labels == 3) <= 1))

    monkeypatch.setattr(crossfit, "source_images", without)
    with pytest.raises(DataError, match="class d has a single image"):
        calibrate(load_source(folder), folder)


@pytest.mark.parametrize("name", ["calibration.safetensors", "card.json"])
def test_a_damaged_calibration_is_refused(calibrated, tmp_path, name):
    folder = shutil.copytree(calibrated, tmp_path / "model")
    path = folder / "calibration" / name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"damaged|truncated"):
        load_source(folder)


def test_the_calibration_of_other_weights_is_refused(calibrated, tmp_path):
    folder = shutil.copytree(calibrated, tmp_path / "model")
    source = load_source(folder)
    with torch.no_grad():
        source.model.fc.bias.add_(1)
    save_source(folder, source.model, source.card)
    with pytest.raises(MismatchError, match=r"calibration.*Remove that folder"):
        load_source(folder)
    shutil.rmtree(folder / "calibration")
    assert load_source(folder).calibration is None
