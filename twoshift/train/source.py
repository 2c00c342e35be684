"""Stage 0: a source model on a long-tailed training set.

Strategies: ``balanced_softmax`` (Ren et al. 2020, the paper's default), ``cross_entropy``,
``balanced_sampling`` and ``classifier_retraining`` (Kang et al. 2020: features from cross-entropy,
then a fresh classifier trained with class-balanced sampling).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from twoshift import models, priors
from twoshift.data import load
from twoshift.data.base import ImageSet
from twoshift.data.long_tail import long_tailed_indices, outside
from twoshift.data.stream import to_float
from twoshift.models.head import find_head, reinitialise
from twoshift.storage import CARD
from twoshift.train import loop
from twoshift.train.augment import augment
from twoshift.train.checkpoint import Source, SourceCard, load_source, save_source
from twoshift.train.recipes import SourceRecipe

HELD_OUT = 2000


def balanced_softmax(logits: Tensor, labels: Tensor, log_prior: Tensor) -> Tensor:
    """Cross-entropy of ``logits + log_prior``: the logits themselves end up prior-free."""
    return F.cross_entropy(logits + log_prior, labels)


def train_source(
    recipe: SourceRecipe,
    out: str | Path,
    *,
    seed: int = 0,
    data: str | Path | None = None,
    progress: loop.Progress = loop.silent,
) -> Source:
    """Train a source model, or go on where an interrupted training stopped.

    Args:
        recipe: All settings.
        out: Folder of the result. One that holds the finished model is loaded and returned.
        seed: Seed of initialisation, order and augmentation.
        data: Root of the data sets.
        progress: Called after every epoch.
    """
    out = Path(out)
    if (out / CARD).exists():
        return _already_trained(out, recipe, seed)
    loop.check_folder(out)
    full = load(recipe.dataset, "train", data)
    chosen = long_tailed_indices(full.labels, recipe.ratio, recipe.profile)
    subset = full.subset(chosen)
    model = fit_source(recipe, subset, seed, out / loop.STATE, progress)
    card = SourceCard(
        architecture=recipe.architecture,
        settings=_model_settings(recipe, subset),
        classes=list(subset.classes),
        class_counts=subset.counts.tolist(),
        dataset=recipe.dataset,
        subset={"profile": recipe.profile, "ratio": recipe.ratio, "seed": 0, "images": len(subset)},
        strategy=recipe.strategy,
        recipe=recipe.model_dump(),
        seed=seed,
        measured=_measure(model, full, outside(full.labels, chosen)),
    )
    save_source(out, model, card)
    loop.clear_state(out)
    return load_source(out)


def _already_trained(out: Path, recipe: SourceRecipe, seed: int) -> Source:
    source = load_source(out)
    loop.check_same_job(
        out, _job(recipe, seed), {"recipe": source.card.recipe, "seed": source.card.seed}
    )
    return source


def _job(recipe: SourceRecipe, seed: int) -> dict[str, Any]:
    return {"recipe": recipe.model_dump(), "seed": seed}


def _model_settings(recipe: SourceRecipe, subset: ImageSet) -> dict[str, Any]:
    channels = subset.images.shape[-1]
    settings = {"classes": len(subset.classes), "channels": channels, **recipe.settings}
    if "mean" not in settings:
        pixels = subset.images.reshape(-1, channels).astype(np.float64) / 255
        settings["mean"] = pixels.mean(0).round(4).tolist()
        settings["std"] = pixels.std(0).round(4).tolist()
    return settings


def fit_source(
    recipe: SourceRecipe, subset: ImageSet, seed: int, state: Path, progress: loop.Progress
) -> nn.Module:
    """Train a model on ``subset``; ``state`` is the folder that an interrupted training resumes."""
    accelerator = Accelerator()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = models.create(recipe.architecture, **_model_settings(recipe, subset))
    model = model.to(accelerator.device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    first = recipe.epochs
    total = first + (recipe.retrain_epochs if recipe.strategy == "classifier_retraining" else 0)
    job = _job(recipe, seed)
    saved = loop.saved_epoch(state, job)
    start = 0 if saved is None else saved[0]

    optimiser = _phase(recipe, model, start, seed)
    if saved is not None:
        loop.restore_state(saved[1], model, optimiser)
    wrapped, optimiser = accelerator.prepare(model, optimiser)
    log_prior = torch.tensor(priors.from_counts(subset.counts), dtype=torch.float32).log()
    log_prior = log_prior.to(accelerator.device)

    def loss_of(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        if recipe.strategy == "balanced_softmax":
            return balanced_softmax(module(x), y, log_prior)
        return F.cross_entropy(module(x), y)

    for epoch in range(start, total):
        retraining = epoch >= first
        if epoch == first:
            optimiser = accelerator.prepare(_phase(recipe, model, epoch, seed))
        wrapped.train(not retraining)  # while only the head learns, the features stand still
        rng = np.random.default_rng([seed, epoch])
        balanced = retraining or recipe.strategy == "balanced_sampling"
        order = list(loop.shuffled_batches(subset.labels, recipe.batch_size, rng, balanced))
        if retraining:
            rates = loop.epoch_rates(recipe, epoch - first, total - first, len(order))
        else:
            rates = loop.epoch_rates(recipe, epoch, first, len(order))
        batches = _batches(subset, order, recipe.augment, rng, accelerator.device)
        mean_loss = loop.run_epoch(accelerator, wrapped, optimiser, loss_of, batches, rates)
        if epoch + 1 < total:
            loop.save_state(state, model, optimiser, epoch + 1, job)
        progress(epoch + 1, total, f"loss {mean_loss:.3f}")
    return model.eval()


def _phase(recipe: SourceRecipe, model: nn.Module, epoch: int, seed: int) -> torch.optim.SGD:
    """The optimiser of the phase that ``epoch`` belongs to; prepares the model for it."""
    if epoch < recipe.epochs:
        return loop.make_optimiser(recipe, list(model.parameters()))
    head = find_head(model)[1]
    model.requires_grad_(False)
    head.requires_grad_(True)
    if epoch == recipe.epochs:
        reinitialise(head, torch.Generator().manual_seed(seed))
    return loop.make_optimiser(recipe, list(head.parameters()))


def _batches(
    subset: ImageSet,
    order: list[NDArray[np.int64]],
    augmentation: str,
    rng: np.random.Generator,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor]]:
    for indices in order:
        x = augment(subset.images[indices], augmentation, rng)
        yield to_float(x).to(device), torch.from_numpy(subset.labels[indices]).to(device)


@torch.inference_mode()
def _measure(model: nn.Module, full: ImageSet, rest: NDArray[np.int64]) -> dict[str, float]:
    """Balanced accuracy on training images outside the subset, where there are any."""
    if len(rest) == 0:
        return {}
    some = np.random.default_rng(0).permutation(rest)[:HELD_OUT]
    device = next(model.parameters()).device
    hits = []
    for start in range(0, len(some), 500):
        part = some[start : start + 500]
        predicted = model(to_float(full.images[part]).to(device)).argmax(1).cpu().numpy()
        hits.append(predicted == full.labels[part])
    correct, labels = np.concatenate(hits), full.labels[some]
    recalls = [correct[labels == c].mean() for c in np.unique(labels)]
    return {"balanced_accuracy_held_out": float(np.mean(recalls)), "held_out": len(some)}
