"""Calibrate a source model on its own training images, by cross-fitting.

A model is too sure of the images it was trained on. So the training set is cut into folds, and each
fold is predicted by a twin of the source model (same recipe, same seed) that was trained on the
others. No image is used that the source model was not trained on.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel
from torch import Tensor, nn

from twoshift.accuracy.fits import Windows
from twoshift.calibration._windows import WINDOWS, draw_windows, label_shares
from twoshift.calibration.base import (
    FOLDER,
    Calibration,
    calibration_from,
    calibration_of,
    save_calibration,
)
from twoshift.calibration.facts import (
    BATCH,
    FROM_IMAGES,
    FROM_PREDICTIONS,
    FROM_SHIFTS,
    ON_DEMAND,
    Shifted,
    assumes,
    check_demands,
    moments,
    shuffled_batches,
)
from twoshift.calibration.shifts import STREAMS, Simulation, sure_threshold
from twoshift.data.base import ImageSet
from twoshift.errors import DataError, ModelError, SettingError
from twoshift.models.norm import use_batch_statistics
from twoshift.storage import card_of, is_saved, read_folder, save_folder
from twoshift.train import loop, reading
from twoshift.train.adapter import source_images
from twoshift.train.checkpoint import SourceModel
from twoshift.train.recipes import SourceRecipe
from twoshift.train.source import fit_source, model_settings, new_model

KIND = "calibration fold"
WORK = f".{FOLDER}.work"  # finished folds, within the folder of the source model


@card_of(KIND)
class FoldCard(BaseModel):
    """Fields of the card of a finished fold."""

    job: dict[str, Any]


def crossfit(
    source: SourceModel,
    *,
    folds: int = 5,
    data: str | Path | None = None,
    also: Collection[str] = (),
    progress: loop.Progress = loop.silent,
) -> Calibration:
    """Calibrate a source model, or resume an interrupted calibration.

    The result is saved in the folder of the source model. If that has a calibration, it is
    returned; facts that it lacks are computed and added, and the others stay as they are.

    Args:
        source: The source model, as `load_source` reads it; it is not changed.
        folds: Parts of the training set, each predicted by a twin trained on the others. 0 trains
            nothing: the source model predicts its own training images, too well.
        data: Root of the data sets.
        also: Facts to compute that take minutes and that only the method of that name needs:
            ``["dart"]``.
        progress: Called after every epoch of every twin.
    """
    demanded = check_demands(also)
    if folds < 0 or folds == 1:
        raise SettingError("folds", must_be="0 or at least 2", got=folds)
    if source.folder is None:
        raise SettingError(
            "a source model to calibrate",
            must_be="saved, since its calibration goes into its folder",
            cure="save_source(folder, model, card), then load_source(folder).",
        )
    known = calibration_of(source) or Calibration({}, {}, folds > 0, folds, source.weights)
    loop.check_same_job(source.folder / FOLDER, {"folds": folds}, {"folds": known.folds})
    predicted = known.running.keys() >= FROM_PREDICTIONS.keys() <= known.batch.keys()
    missing = [name for name in (*FROM_IMAGES, *FROM_SHIFTS) if name not in known.facts]
    demanded = [name for name in demanded if name not in known.facts]
    if predicted and not (missing or demanded):
        return known
    subset = source_images(source, data)
    if missing or not predicted:
        known = _completed(_Job(source, subset, folds, data, progress), known, predicted, missing)
        save_calibration(source.folder, known)
        shutil.rmtree(source.folder / WORK, ignore_errors=True)
    for name in demanded:
        value = ON_DEMAND[name](source.model, subset, partial(_training, progress, name))
        known = replace(known, facts={**known.facts, name: value})
        save_calibration(source.folder, known)
    return known


def _completed(job: _Job, known: Calibration, predicted: bool, missing: list[str]) -> Calibration:
    """A calibration with all facts that every one has."""
    running, batch = known.running, known.batch
    facts = {**known.facts, **dict.fromkeys(missing)}
    if not predicted or any(name in FROM_SHIFTS for name in missing):
        tensors = _predictions(job)
        labels, windows = tensors["labels"], (tensors["means"], tensors["shares"])
        running = {**calibration_from(tensors["running"], labels), **running}
        batch = {**calibration_from(tensors["batch"], labels, windows), **batch}
        shifted = _shifted(job, tensors, running)
        facts |= {name: FROM_SHIFTS[name](shifted) for name in missing if name in FROM_SHIFTS}
    for name in missing:
        if name in FROM_IMAGES:
            with suppress(ModelError):  # the network does not have it: None
                facts[name] = FROM_IMAGES[name](job.source.model, job.subset)
    return replace(known, running=running, batch=batch, facts=facts)


def stratified_folds(labels: NDArray[np.int64], folds: int, seed: int = 0) -> NDArray[np.int64]:
    """The fold of every sample: each class spread evenly, and the folds of even size."""
    rng = np.random.default_rng(seed)
    fold_of = np.empty(len(labels), np.int64)
    by_class = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    fold_of[np.concatenate(by_class)] = np.arange(len(labels)) % folds
    return fold_of


class _Job(NamedTuple):
    """What all folds have in common; see `crossfit`."""

    source: SourceModel
    subset: ImageSet
    folds: int
    data: str | Path | None
    progress: loop.Progress


def _predictions(job: _Job) -> dict[str, Tensor]:
    """What `_predict` returns, for every training image."""
    source, subset, folds, _, _ = job
    if folds == 0:
        recipe = SourceRecipe.model_validate(source.card.recipe)
        return _predict(source.model, subset, recipe.augment, WINDOWS)
    if subset.counts.min() < 2:
        raise DataError(
            f"images of class {subset.classes[int(subset.counts.argmin())]!r}",
            must_be="at least two, to predict one after training on another",
            got=subset.counts.min(),
            cure="Calibrate without cross-fitting: folds=0.",
        )
    parts = [_fold(job, fold) for fold in range(folds)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _shifted(job: _Job, predictions: Mapping[str, Tensor], running: Mapping[str, Any]) -> Shifted:
    """Windows of shifted streams of all folds, each predicted by the twin that has not seen it."""
    temperature, bias = float(running["temperature"]), running["bias"]
    threshold = sure_threshold(predictions["running"], predictions["labels"], temperature)
    known = {"temperature": temperature, "bias": bias, "assumes": assumes(job.source.card)}
    if job.folds == 0:
        halves = [(job.source.model, job.subset, job.subset)]
    else:
        halves = [_twin(job, fold) for fold in range(2)]  # enough for a dozen weights
    parts = []
    for fold, (model, trained_on, new) in enumerate(halves):
        facts = {**known, "moments": None}
        with suppress(ModelError):
            facts["moments"] = moments(model, trained_on)
        streams = range(fold * STREAMS, (fold + 1) * STREAMS)
        report = partial(_simulating, job.progress, fold, len(halves))
        simulation = Simulation(model, facts, threshold)
        parts.append(simulation.windows(new.images, new.labels, streams, report))
    return Shifted(Windows.cat(parts), threshold)


def _simulating(progress: loop.Progress, fold: int, folds: int, done: int, total: int) -> None:
    progress(fold * total + done, folds * total, "shifted streams")


def _training(progress: loop.Progress, what: str, done: int, total: int) -> None:
    progress(done, total, what)


def _twin(job: _Job, fold: int) -> tuple[nn.Module, ImageSet, ImageSet]:
    """A twin of the source model, the images that it was trained on, and those of the fold."""
    source, subset, folds, data, progress = job
    assert source.folder is not None

    def fold_progress(done: int, total: int, facts: str) -> None:
        progress(fold * total + done, folds * total, f"fold {fold + 1} of {folds}, {facts}")

    fold_of = stratified_folds(subset.labels, folds)
    recipe, seed = SourceRecipe.model_validate(source.card.recipe), source.card.seed
    rest, held_out = (
        subset.subset(np.flatnonzero(rows)) for rows in (fold_of != fold, fold_of == fold)
    )
    twin, _ = new_model(recipe, model_settings(recipe, rest), seed, data)
    state = source.folder / WORK / f"{_name(fold, folds)}{loop.STATE}"
    return fit_source(twin, recipe, rest, seed, state, fold_progress).eval(), rest, held_out


def _name(fold: int, folds: int) -> str:
    return f"{fold + 1}-of-{folds}"  # other numbers of folds are other folds


def _fold(job: _Job, fold: int) -> dict[str, Tensor]:
    """Predictions for one fold, by a twin trained on the others; read back if they are there."""
    source, _, folds, _, _ = job
    assert source.folder is not None
    out = source.folder / WORK / _name(fold, folds)
    identity = {"source": source.weights, "fold": fold, "folds": folds}
    if is_saved(out):
        saved = read_folder(out, KIND)
        loop.check_same_job(out, identity, saved.card["job"])
        return saved.file("predictions")

    twin, _, held_out = _twin(job, fold)
    augment = SourceRecipe.model_validate(source.card.recipe).augment
    predictions = _predict(twin, held_out, augment, -(-WINDOWS // folds))
    save_folder(out, KIND, {"job": identity}, {"predictions": predictions})
    return predictions


@torch.inference_mode()
def _predict(model: nn.Module, images: ImageSet, augment: str, windows: int) -> dict[str, Tensor]:
    """Labels, logits under running statistics and under those of shuffled batches, and windows.

    Of every label-shifted window, ``means`` holds the mean probabilities and ``shares`` the label
    shares. The images of windows are augmented as in training, since those of rare classes recur.
    """
    device = next(model.parameters()).device

    def logits(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
        return torch.cat([model(x.to(device)).float().cpu() for x in batches])

    model.eval()
    parts = reading.in_parts(len(images), images.images)
    running = logits(model, reading.tensors(images.images, parts))
    by_batch = copy.deepcopy(model)
    use_batch_statistics(by_batch)
    shuffled = shuffled_batches(len(images), len(images))
    batch = torch.empty_like(running)
    order = torch.from_numpy(np.concatenate(shuffled))
    batch[order] = logits(by_batch, reading.tensors(images.images, shuffled))
    rng, means, shares = np.random.default_rng(0), [], []
    for rows in draw_windows(images.labels, len(images.classes), windows, rng=rng):
        batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        window = logits(by_batch, reading.tensors(images.images, batches, augment, rng))
        means.append(window.softmax(1).mean(0))
        shares.append(torch.from_numpy(label_shares(images.labels[rows], len(images.classes))))
    return {
        "labels": torch.from_numpy(images.labels),
        "running": running,
        "batch": batch,
        "means": torch.stack(means),
        "shares": torch.stack(shares),
    }
