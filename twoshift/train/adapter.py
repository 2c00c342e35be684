"""Stage 1: an adapter, trained on a frozen source model.

The label shift adapter: every iteration draws a label distribution between source, uniform and
reversed labels and trains the shifted head with the generalised logit-adjusted loss,
CE(logits + tau * log pi_s, y). Its minimiser models the prior pi_s ** lambda with
lambda = 1 - tau; the adapter stores lambda.

The classwise adapter can follow any label distribution pi, so every iteration draws any, and the
loss is CE(logits + log pi_s - log pi, y): its minimiser models pi itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from pydantic import ValidationError
from torch import Tensor, nn

from twoshift import priors
from twoshift.adapters import (
    Adapter,
    ClasswiseAdapter,
    LabelShiftAdapter,
    adapters,
    create,
    load_adapter,
    save_adapter,
    shifted_logits,
)
from twoshift.adapters.base import FLOOR, bare_head, linear_weights
from twoshift.data import load
from twoshift.data.base import ImageSet
from twoshift.data.files import drop_bad
from twoshift.errors import MismatchError, SettingError
from twoshift.models.classifier import prepare
from twoshift.models.head import features, size_of
from twoshift.priors import Prior
from twoshift.registry import check_settings
from twoshift.storage import CARD, read_card
from twoshift.train import devices, loop, reading
from twoshift.train.checkpoint import SourceModel
from twoshift.train.recipes import AdapterRecipe
from twoshift.train.source import training_rows


def between(position: float, source_prior: Prior, lambdas: Sequence[float]) -> tuple[Prior, float]:
    """Label distribution and lambda at a position: 1 is source, 0 uniform, -1 reversed labels."""
    uniform = priors.uniform(len(source_prior))
    if position >= 0:
        end, end_lambda = source_prior, lambdas[0]
    else:
        order = list(priors.class_order(source_prior))
        end, end_lambda = priors.reverse(source_prior, order), lambdas[2]
    share = abs(position)
    return share * end + (1 - share) * uniform, share * end_lambda + (1 - share) * lambdas[1]


def draw_position(points: int, rng: np.random.Generator) -> float:
    """One of ``points`` even positions between 1 and -1; any position when ``points`` is 0."""
    if points == 0:
        return float(rng.uniform(-1, 1))
    return float(rng.choice(np.linspace(1, -1, points)))


def adjusted_loss(logits: Tensor, labels: Tensor, margin: Tensor) -> Tensor:
    """Logit-adjusted loss: its minimiser models the prior pi_s / exp(margin).

    The paper's margin is tau log pi_s, with tau = 1 - lambda.
    """
    return F.cross_entropy(logits + margin, labels)


def train_adapter(
    source: SourceModel,
    recipe: AdapterRecipe,
    out: str | Path,
    *,
    seed: int = 0,
    data: str | Path | None = None,
    progress: loop.Progress = loop.silent,
) -> Adapter:
    """Train an adapter for ``source``, or go on where an interrupted training stopped.

    Args:
        source: The source model; it is not changed.
        recipe: All settings.
        out: Folder of the result. If it holds the finished adapter, that one is returned.
        seed: Seed of initialisation, order, augmentation and drawn distributions.
        data: Root of the data sets.
        progress: Called after every epoch.
    """
    out = Path(out)
    job = {"recipe": recipe.model_dump(), "seed": seed, "source": source.weights}
    if (out / CARD).exists():
        loop.check_same_job(out, job, training_of(read_card(out, "adapter")) or {})
        return load_adapter(out)
    name, settings = recipe.named_adapter
    check_settings(f"adapter {name!r}", adapters[name], settings)
    loop.check_folder(out)
    subset = source_images(source, data)
    adapter = _fit(*_on_device(source.model), subset, recipe, job, out / loop.STATE, progress)
    accelerator = devices.make_accelerator()
    if accelerator.is_main_process:
        save_adapter(out, adapter, {"training": job})
        loop.clear_state(out)
    accelerator.wait_for_everyone()
    return load_adapter(out)


def fit_adapter(
    model: nn.Module,
    images: ImageSet,
    recipe: AdapterRecipe,
    *,
    seed: int = 0,
    progress: loop.Progress = loop.silent,
    head: str | None = None,
) -> Adapter:
    """Train an adapter for any model, on images that it was trained on.

    Args:
        model: A classifier whose head is linear or a 1x1 convolution; it is not changed. It should
            have been trained for equally frequent classes, for example by balanced softmax: then
            its logits contain no label distribution yet.
        images: Training images; their label distribution counts as the source's.
        recipe: All settings; ``load_recipe(AdapterRecipe, "cifar-cpu", epochs=20)``.
        seed: Seed of initialisation, order, augmentation and drawn distributions.
        progress: Called after every epoch.
        head: Path of the head; needed only if `find_head` cannot find it.
    """
    return _fit(*_on_device(model, head), images, recipe, {"seed": seed}, None, progress)


def source_images(source: SourceModel, data: str | Path | None = None) -> ImageSet:
    """The images that a source model was trained on."""
    card = source.card
    full = load(card.dataset, "train", data, **card.recipe.get("decoding", {}))
    if card.subset.get("skipped"):
        full = drop_bad(full)
    subset = full.subset(training_rows(full.labels, **card.subset))
    if subset.counts.tolist() != card.class_counts:
        raise MismatchError(
            f"class counts of the training images in {card.dataset}",
            must_be=card.class_counts,
            got=subset.counts.tolist(),
            cure="Point --data at the images that the source model was trained on.",
        )
    return subset


def _on_device(model: nn.Module, head: str | None = None) -> tuple[nn.Module, nn.Module]:
    """A copy of a model on the training device, in evaluation mode, and its head."""
    own = prepare(model).eval().to(devices.make_accelerator().device)
    return own, bare_head(own, head)[1]


def _fit(
    model: nn.Module,
    head: nn.Module,
    subset: ImageSet,
    recipe: AdapterRecipe,
    job: dict[str, Any],
    state: Path | None,
    progress: loop.Progress,
) -> Adapter:
    """Train a new adapter for a model, or resume from the saved state of the same job."""
    accelerator = devices.make_accelerator()
    seed, device = job["seed"], accelerator.device
    counts = subset.counts.tolist()
    source_prior = priors.from_counts(counts)
    weight, bias = (None if t is None else t.detach().float() for t in linear_weights(head))
    assert weight is not None
    adapter = _new_adapter(head, recipe, counts, seed).to(device)
    optimiser = loop.make_optimiser(recipe, list(adapter.parameters()))
    saved = None if state is None else loop.saved_epoch(state, job)
    if saved is not None:
        loop.restore_state(saved[1], adapter, optimiser)
    wrapped, optimiser = accelerator.prepare(adapter, optimiser)
    log_prior = loop.log_prior(counts, device)

    def loss_of(module: nn.Module, batch: tuple[Tensor, Tensor, float, Tensor, Tensor]) -> Tensor:
        h, y, share, prior, margin = batch
        logits = shifted_logits(h, weight, bias, module(prior))
        return share * adjusted_loss(logits, y, margin)

    start = 0 if saved is None else saved[0]
    views = _views(accelerator, model, head, subset, recipe, seed, start)
    labels = torch.from_numpy(subset.labels).to(device)
    for epoch, h in zip(range(start, recipe.epochs), views, strict=False):
        rng = np.random.default_rng([seed, epoch])
        order = list(loop.shuffled_batches(subset.labels, recipe.batch_size, rng))
        shares = (devices.share(rows, accelerator) for rows in order)
        batches = (
            (h[rows], labels[rows], share, *_draw(recipe, source_prior, adapter, log_prior, rng))
            for rows, share in shares
        )
        rates = loop.epoch_rates(recipe, epoch, recipe.epochs, len(order))
        loss = loop.run_epoch(accelerator, wrapped, optimiser, loss_of, batches, rates)
        if accelerator.is_main_process:
            if state is not None and epoch + 1 < recipe.epochs:
                loop.save_state(state, adapter, optimiser, epoch + 1, job)
            progress(epoch + 1, recipe.epochs, f"loss {loss:.3f}")
    return adapter.eval()


def _draw(
    recipe: AdapterRecipe,
    source_prior: Prior,
    adapter: Adapter,
    log_prior: Tensor,
    rng: np.random.Generator,
) -> tuple[Tensor, Tensor]:
    """A random label distribution, and the margin of the loss that belongs to it."""
    if isinstance(adapter, ClasswiseAdapter):
        prior = torch.from_numpy(priors.anywhere(source_prior, rng)).to(log_prior)
        return prior, log_prior - prior.clamp_min(FLOOR).log()
    assert isinstance(adapter, LabelShiftAdapter)
    position = draw_position(recipe.points, rng)
    labels, lambda_ = between(position, source_prior, adapter.lambdas)
    return torch.from_numpy(labels).to(log_prior), (1 - lambda_) * log_prior


def _new_adapter(
    head: nn.Module, recipe: AdapterRecipe, class_counts: Sequence[int], seed: int
) -> Adapter:
    name, settings = recipe.named_adapter
    if not adapters[name].needs_training:
        names = [repr(other) for other in adapters if adapters[other].needs_training]
        raise SettingError(
            "the adapter to train",
            must_be=" or ".join(names),
            got=f"{name!r}, which needs no training",
            cure=f"Run with it as it is: --adapter {name}.",
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return create(name, *size_of(head), class_counts=class_counts, **settings)


def training_of(card: dict[str, Any]) -> dict[str, Any] | None:
    """The training that a card describes, with its recipe spelt as today; None if unknown."""
    job = card.get("training")
    try:
        return job and {**job, "recipe": AdapterRecipe.model_validate(job["recipe"]).model_dump()}
    except (KeyError, ValidationError):  # no recipe, or one of a later version
        return job


def _views(
    accelerator: Accelerator,
    model: nn.Module,
    head: nn.Module,
    subset: ImageSet,
    recipe: AdapterRecipe,
    seed: int,
    start: int,
) -> Iterator[Tensor]:
    """Features of all images for epochs ``start``, ``start + 1``, ...

    After ``recipe.views`` differently augmented passes (one without augmentation) they are reused.
    Several processes divide the work.
    """
    parts, processes = reading.in_parts(len(subset), subset.images), accelerator.num_processes
    edges = [len(parts) * i // processes for i in range(processes + 1)]
    own = parts[edges[accelerator.process_index] : edges[accelerator.process_index + 1]]
    count = 1 if recipe.augment == "none" else recipe.views
    views: dict[int, Tensor] = {}
    for epoch in itertools.count(start):
        view = epoch % count if count else epoch
        h = views.get(view)
        if h is None:
            rng = devices.own_generator(np.random.default_rng([seed, view, 1]), accelerator)
            images = reading.tensors(subset.images, own, recipe.augment, rng)
            h = devices.gather(_features(model, head, images), accelerator)
            if count:
                views[view] = h
        yield h


@torch.no_grad()
def _features(model: nn.Module, head: nn.Module, images: Iterable[Tensor]) -> Tensor:
    """Inputs of the head, for all images."""
    weight = next(head.parameters())
    empty = torch.empty(0, size_of(head)[0], device=weight.device)  # a process may have no images
    return torch.cat([empty, *(features(model, x.to(weight), head).float() for x in images)])
