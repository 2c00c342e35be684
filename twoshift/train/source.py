"""Stage 0: train a source model on a long-tailed training set.

Strategies: ``balanced_softmax`` (Ren et al. 2020, the paper's default), ``cross_entropy``,
``balanced_sampling`` and ``classifier_retraining`` (Kang et al. 2020: features are trained with
cross-entropy, then a new classifier with class-balanced sampling).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from twoshift import models
from twoshift.data import load
from twoshift.data.base import ImageSet, data_root, datasets
from twoshift.data.files import drop_bad
from twoshift.data.long_tail import ClassOrder, Profile, long_tailed_indices, outside
from twoshift.errors import SettingError
from twoshift.models.head import find_head, reinitialise
from twoshift.models.weights import PACKAGE, load_weights
from twoshift.registry import check_settings
from twoshift.storage import CARD
from twoshift.train import devices, loop, reading
from twoshift.train.checkpoint import SourceCard, SourceModel, load_source, save_source
from twoshift.train.recipes import SourceRecipe

HELD_OUT = 2000  # limit of images that the card's accuracy is measured on


def balanced_softmax(logits: Tensor, labels: Tensor, log_prior: Tensor) -> Tensor:
    """Cross-entropy of ``logits + log_prior``, which keeps the prior out of the logits."""
    return F.cross_entropy(logits + log_prior, labels)


def train_source(
    recipe: SourceRecipe,
    out: str | Path,
    *,
    seed: int = 0,
    data: str | Path | None = None,
    skip_bad: bool = False,
    progress: loop.Progress = loop.silent,
) -> SourceModel:
    """Train a source model, or resume an interrupted training.

    Args:
        recipe: Settings of the training.
        out: Folder of the result; if it has the finished model, that is loaded and returned.
        seed: Seed of initialisation, order and augmentation.
        data: Root folder of the data sets.
        skip_bad: Whether to leave out images that cannot be decoded; the card has their number.
        progress: Function that is called after every epoch.
    """
    out = Path(out)
    if (out / CARD).exists():
        source = load_source(out)
        saved_job = {"recipe": source.card.recipe, "seed": source.card.seed}
        loop.check_same_job(out, _job(recipe, seed), saved_job)
        return source
    check_recipe(recipe)
    loop.check_folder(out)
    accelerator = devices.make_accelerator()
    full = load(recipe.dataset, "train", data, **(recipe.decoding or {}))
    if skip_bad:
        full = drop_bad(full)
    selection: dict[str, Any] = {"profile": recipe.profile, "ratio": recipe.ratio, "seed": 0}
    selection |= {"order": recipe.order} if recipe.order else {}
    rows = training_rows(full.labels, **selection)
    subset = full.subset(rows)
    settings = model_settings(recipe, subset)
    model, pretrained = new_model(recipe, settings, seed, data)
    model = fit_source(model, recipe, subset, seed, out / loop.STATE, progress)
    if accelerator.is_main_process:
        selection |= {"images": len(subset)} | ({"skipped": full.skipped} if skip_bad else {})
        card = SourceCard(
            architecture=recipe.architecture,
            settings=settings,
            classes=list(subset.classes),
            class_counts=subset.counts.tolist(),
            dataset=recipe.dataset,
            subset=selection,
            strategy=recipe.strategy,
            recipe=recipe.model_dump(),
            seed=seed,
            measured=_measure(model, full, outside(full.labels, rows)),
            pretrained=pretrained,
        )
        save_source(out, model, card)
        loop.clear_state(out)
    accelerator.wait_for_everyone()
    return load_source(out)


def check_recipe(recipe: SourceRecipe) -> None:
    """Refuse an unknown data set, backbone or setting, before any work is done."""
    datasets[recipe.dataset.partition(":")[0]]
    name = recipe.architecture
    if ":" not in name:  # others are known to their libraries
        check_settings(f"model {name!r}", models.models[name], recipe.settings)


def training_rows(
    labels: NDArray[np.int64],
    *,
    ratio: float,
    profile: Profile,
    seed: int = 0,
    order: ClassOrder = "index",
    **facts: Any,
) -> NDArray[np.int64]:
    """Rows of the training images that a card's ``subset`` describes; ``facts`` are ignored."""
    return long_tailed_indices(labels, ratio, profile, seed, order)


def _job(recipe: SourceRecipe, seed: int) -> dict[str, Any]:
    return {"recipe": recipe.model_dump(), "seed": seed}


def model_settings(recipe: SourceRecipe, subset: ImageSet) -> dict[str, Any]:
    """Settings of the backbone; a pretrained one keeps its own normalisation of the images."""
    channels = subset.images.shape[-1]
    settings = {"classes": len(subset.classes), "channels": channels, **recipe.settings}
    if ("mean" in settings) != ("std" in settings):
        raise SettingError("settings.mean and settings.std", must_be="both set, or neither")
    if "mean" not in settings and recipe.pretrained is None:
        settings["mean"], settings["std"] = reading.pixel_statistics(subset.images)
    return settings


def new_model(
    recipe: SourceRecipe, settings: dict[str, Any], seed: int, data: str | Path | None
) -> tuple[nn.Module, str | None]:
    """The backbone before training, and the SHA-256 of its pretrained weights, if it has any."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = models.create(recipe.architecture, **settings)
    weights = recipe.pretrained
    if weights is None:
        return model, None
    as_given = weights == PACKAGE or Path(weights).exists()
    return model, load_weights(model, weights if as_given else data_root(data) / weights).sha256


def fit_source(
    model: nn.Module,
    recipe: SourceRecipe,
    subset: ImageSet,
    seed: int,
    state: Path,
    progress: loop.Progress,
) -> nn.Module:
    """Train a model on ``subset``, resuming from the folder ``state`` after an interruption."""
    accelerator = devices.make_accelerator()
    model.to(accelerator.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    first_phase = total = recipe.epochs
    if recipe.strategy == "classifier_retraining":
        total += recipe.retrain_epochs
    job = _job(recipe, seed)
    saved = loop.saved_epoch(state, job)
    start = 0 if saved is None else saved[0]

    optimiser = _phase(recipe, model, start, seed)
    if saved is not None:
        # the second phase begins with an optimiser of its own
        loop.restore_state(saved[1], model, None if start == first_phase else optimiser)
    wrapped, optimiser = accelerator.prepare(model, optimiser)
    log_prior = loop.log_prior(subset.counts, accelerator.device)
    largest = min(recipe.batch_size, len(subset))
    smallest = devices.smallest_batch(model, largest, accelerator)

    def loss_of(module: nn.Module, batch: tuple[Tensor, Tensor, float]) -> Tensor:
        x, y, weight = batch
        if recipe.strategy == "balanced_softmax":
            return weight * balanced_softmax(module(x), y, log_prior)
        return weight * F.cross_entropy(module(x), y)

    for epoch in range(start, total):
        retraining = epoch >= first_phase
        if epoch == first_phase:
            wrapped, optimiser = accelerator.prepare(model, _phase(recipe, model, epoch, seed))
        wrapped.train(not retraining)  # batch norms do not move while only the head is trained
        rng = np.random.default_rng([seed, epoch])
        balanced = retraining or recipe.strategy == "balanced_sampling"
        order = [*loop.shuffled_batches(subset.labels, recipe.batch_size, rng, balanced, smallest)]
        begin, end = (first_phase, total) if retraining else (0, first_phase)
        rates = loop.epoch_rates(recipe, epoch - begin, end - begin, len(order))
        shares = [devices.share(rows, accelerator) for rows in order]
        own_rng = devices.own_generator(rng, accelerator)
        batches = _batches(subset, shares, recipe.augment, own_rng, accelerator.device)
        mean_loss = loop.run_epoch(accelerator, wrapped, optimiser, loss_of, batches, rates)
        if accelerator.is_main_process:
            if epoch + 1 < total:
                loop.save_state(state, model, optimiser, epoch + 1, job)
            progress(epoch + 1, total, f"loss {mean_loss:.3f}")
    return model.eval()


def _phase(recipe: SourceRecipe, model: nn.Module, epoch: int, seed: int) -> torch.optim.Optimizer:
    """Prepare the model for the phase that ``epoch`` is in, and return the phase's optimiser."""
    if epoch < recipe.epochs and recipe.backbone_lr is None:
        return loop.make_optimiser(recipe, list(model.parameters()))
    head = find_head(model)[1]
    if epoch < recipe.epochs:
        in_head = set(head.parameters())
        backbone = [p for p in model.parameters() if p not in in_head]
        groups: list[dict[str, Any]] = [
            {"params": backbone, "scale": recipe.backbone_lr},
            {"params": list(head.parameters())},
        ]
        return loop.make_optimiser(recipe, groups)
    model.requires_grad_(False)
    head.requires_grad_(True)
    if epoch == recipe.epochs:
        reinitialise(head, torch.Generator().manual_seed(seed))
    return loop.make_optimiser(recipe, list(head.parameters()))


def _batches(
    subset: ImageSet,
    shares: Sequence[tuple[NDArray[np.int64], float]],
    augmentation: str,
    rng: np.random.Generator,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor, float]]:
    images = reading.tensors(subset.images, [rows for rows, _ in shares], augmentation, rng)
    for x, (rows, weight) in zip(images, shares, strict=True):
        yield x.to(device), torch.from_numpy(subset.labels[rows]).to(device), weight


@torch.inference_mode()
def _measure(model: nn.Module, full: ImageSet, outside_rows: NDArray[np.int64]) -> dict[str, float]:
    """Balanced accuracy on training images outside the subset, if there are any."""
    if len(outside_rows) == 0:
        return {}
    held_out = np.random.default_rng(0).permutation(outside_rows)[:HELD_OUT]
    device = next(model.parameters()).device
    parts = [held_out[rows] for rows in reading.in_parts(len(held_out), full.images)]
    images = reading.tensors(full.images, parts)
    predicted = torch.cat([model(x.to(device)).argmax(1).cpu() for x in images]).numpy()
    labels = full.labels[held_out]
    correct = predicted == labels
    recalls = [correct[labels == c].mean() for c in np.unique(labels)]
    return {"balanced_accuracy_held_out": float(np.mean(recalls)), "held_out": len(held_out)}
