"""Calibrate a source model on its own training images, by cross-fitting.

A model is too sure of the images it was trained on. So the long-tailed set is cut into folds; for
each one a twin of the source model (same recipe, same seed) is trained on the others and predicts
it. The images stay the ones that the source model was allowed to see.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from twoshift.calibration._windows import WINDOWS, draw_windows, label_shares
from twoshift.calibration.base import (
    FOLDER,
    Calibration,
    calibration_from,
    load_calibration,
    save_calibration,
)
from twoshift.calibration.facts import BATCH, FROM_IMAGES, Value, shuffled_batches
from twoshift.data.base import ImageSet
from twoshift.errors import DataError, ModelError, SettingError
from twoshift.models.norm import use_batch_statistics
from twoshift.storage import atomic_folder, read_card, read_tensors, write_card, write_tensors
from twoshift.train import loop, reading
from twoshift.train.adapter import source_images
from twoshift.train.checkpoint import SourceModel
from twoshift.train.recipes import SourceRecipe
from twoshift.train.source import fit_source, model_settings, new_model

KIND = "calibration fold"
WORK = f".{FOLDER}.work"  # finished folds, within the folder of the source model


def crossfit(
    source: SourceModel,
    folder: str | Path,
    *,
    folds: int = 5,
    data: str | Path | None = None,
    progress: loop.Progress = loop.silent,
) -> Calibration:
    """Calibrate a source model, or go on where an interrupted calibration stopped.

    Args:
        source: The source model; it is not changed.
        folder: Its folder; the result goes to ``calibration`` within it. One that is there
            already is returned, completed by facts that it lacks.
        folds: Parts of the training set, each predicted by a twin trained on the others. 0 trains
            nothing: the source model predicts its own training images, too well.
        data: Root of the data sets.
        progress: Called after every epoch of every twin.
    """
    folder = Path(folder)
    if folds < 0 or folds == 1:
        raise SettingError("folds", must_be="0 or at least 2", got=folds)
    calibration = load_calibration(folder, source.weights)
    if calibration is not None:
        loop.check_same_job(folder / FOLDER, {"folds": folds}, {"folds": calibration.folds})
        if calibration.facts.keys() >= FROM_IMAGES.keys():
            return calibration
    subset = source_images(source, data)
    if calibration is None:
        calibration = _measure(source, folder, subset, folds, data, progress)
    facts = dict(calibration.facts)
    for name in FROM_IMAGES.keys() - facts.keys():
        facts[name] = _fact(name, source.model, subset)
    calibration = replace(calibration, facts=facts)
    save_calibration(folder, calibration)
    shutil.rmtree(folder / WORK, ignore_errors=True)
    return calibration


def _fact(name: str, model: nn.Module, images: ImageSet) -> Value:
    """A fact of the training images; empty where the network lacks the layers that it describes."""
    try:
        return FROM_IMAGES[name](model, images)
    except ModelError:
        return {}


def stratified_folds(labels: NDArray[np.int64], folds: int, seed: int = 0) -> NDArray[np.int64]:
    """The fold of every sample: each class spread evenly, and the folds of even size."""
    rng = np.random.default_rng(seed)
    place = np.empty(len(labels), np.int64)
    by_class = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    place[np.concatenate(by_class)] = np.arange(len(labels)) % folds
    return place


def _measure(
    source: SourceModel,
    folder: Path,
    subset: ImageSet,
    folds: int,
    data: str | Path | None,
    progress: loop.Progress,
) -> Calibration:
    if folds == 0:
        recipe = SourceRecipe.model_validate(source.card.recipe)
        parts = [_predict(source.model, subset, recipe.augment, WINDOWS)]
    else:
        if subset.counts.min() < 2:
            raise DataError(
                f"class {subset.classes[int(subset.counts.argmin())]} has a single image",
                must_be="at least two, to predict one after training on another",
                cure="Calibrate without cross-fitting: folds=0.",
            )
        place = stratified_folds(subset.labels, folds)
        parts = [
            _fold(source, folder / WORK, subset, place, fold, folds, data, progress)
            for fold in range(folds)
        ]
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return Calibration(
        calibration_from(whole["running"], whole["labels"]),
        calibration_from(whole["batch"], whole["labels"], (whole["means"], whole["shares"])),
        held_out=folds > 0,
        folds=folds,
        source=source.weights,
    )


def _fold(
    source: SourceModel,
    work: Path,
    subset: ImageSet,
    place: NDArray[np.int64],
    fold: int,
    folds: int,
    data: str | Path | None,
    progress: loop.Progress,
) -> dict[str, Tensor]:
    """Predictions of one fold by a twin that has not seen it; kept when finished."""
    out = work / f"{fold + 1}-of-{folds}"  # other numbers of folds are other folds
    job = {"source": source.weights, "fold": fold, "folds": folds}
    tensors = "predictions.safetensors"
    if out.exists():
        card = read_card(out, KIND)
        loop.check_same_job(out, job, card["job"])
        return read_tensors(card["folder"] / tensors)
    recipe = SourceRecipe.model_validate(source.card.recipe)

    def fold_progress(done: int, total: int, facts: str) -> None:
        progress(fold * total + done, folds * total, f"fold {fold + 1} of {folds}, {facts}")

    rest, held_out = np.flatnonzero(place != fold), np.flatnonzero(place == fold)
    state = work / f"{out.name}{loop.STATE}"
    seen, seed = subset.subset(rest), source.card.seed
    twin, _ = new_model(recipe, model_settings(recipe, seen), seed, data)
    twin = fit_source(twin, recipe, seen, seed, state, fold_progress)
    found = _predict(twin, subset.subset(held_out), recipe.augment, -(-WINDOWS // folds))
    with atomic_folder(out) as temporary:
        write_tensors(temporary / tensors, found)
        write_card(temporary, {"kind": KIND, "job": job})
    return found


@torch.inference_mode()
def _predict(model: nn.Module, images: ImageSet, augment: str, windows: int) -> dict[str, Tensor]:
    """Labels, logits with running statistics and with those of shuffled batches, and windows.

    Of label-shifted windows of batches: mean probabilities and label shares. Their images are
    augmented as in training, since those of rare classes come again and again.
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
        cut = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        seen = logits(by_batch, reading.tensors(images.images, cut, augment, rng))
        means.append(seen.softmax(1).mean(0))
        shares.append(torch.from_numpy(label_shares(images.labels[rows], len(images.classes))))
    return {
        "labels": torch.from_numpy(images.labels),
        "running": running,
        "batch": batch,
        "means": torch.stack(means),
        "shares": torch.stack(shares),
    }
