"""The training loop of source models and adapters: optimiser, schedule, epochs, resuming.

All randomness of an epoch comes from (seed, epoch), so a killed training resumes after its last
epoch and ends with the same weights as an undisturbed one. The loop runs through accelerate; for
several devices, see `twoshift.train.devices`.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from pydantic import BaseModel, NonNegativeInt
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from twoshift import priors
from twoshift.errors import CheckpointError, SettingError
from twoshift.storage import (
    card_of,
    is_saved,
    misfits,
    read_folder,
    save_folder,
    storage_errors,
)
from twoshift.train.devices import lost_process_errors
from twoshift.train.recipes import Optimiser

Batch = TypeVar("Batch")
Progress = Callable[[int, int, str], None]  # epochs done, epochs in total, loss as text
KIND = "training state"
STATE = ".training"  # folder of the state, inside the folder of the result
TENSORS = "state"
MEMORY = {  # of an optimiser, for every weight: names in a saved state, and torch's
    SGD: {"momentum": "momentum_buffer"},
    AdamW: {"mean": "exp_avg", "square": "exp_avg_sq", "steps": "step"},
}


@card_of(KIND)
class StateCard(BaseModel):
    """Fields of the card of a training state."""

    epoch: NonNegativeInt
    job: dict[str, Any]


def silent(done: int, total: int, facts: str) -> None:
    """A progress callback that does nothing."""


def learning_rate(recipe: Optimiser, progress: float) -> float:
    """The learning rate after a fraction ``progress`` (0 to 1) of the training."""
    if recipe.schedule == "constant":
        return recipe.lr
    if recipe.schedule == "steps":
        done = progress * recipe.epochs + 1e-6  # in floats, 90 * (60 / 90) may be below 60
        return recipe.lr * 0.1 ** sum(done >= m for m in recipe.milestones or ())
    if recipe.schedule == "cosine":
        return recipe.lr * 0.5 * (1 + math.cos(math.pi * progress))
    warm_up = 0.2  # one cycle: the rate rises for a fifth of the training, then falls to zero
    if progress < warm_up:
        return recipe.lr * (0.04 + 0.96 * progress / warm_up)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))


def log_prior(class_counts: Sequence[int] | NDArray[np.int64], device: torch.device) -> Tensor:
    """Log of the class shares in training; a class without images counts as half an image."""
    prior = np.maximum(priors.from_counts(class_counts), 0.5 / np.sum(class_counts))
    return torch.tensor(prior, dtype=torch.float32).log().to(device)


def make_optimiser(
    recipe: Optimiser, parameters: list[nn.Parameter] | list[dict[str, Any]]
) -> Optimizer:
    """The recipe's optimiser; ``scale`` of a group is a factor on its learning rate."""
    decay = recipe.weight_decay
    if recipe.optimizer == "adamw":
        return AdamW(parameters, recipe.lr, (recipe.momentum, 0.999), weight_decay=decay)
    nesterov = recipe.nesterov and recipe.momentum > 0
    return SGD(parameters, recipe.lr, recipe.momentum, nesterov=nesterov, weight_decay=decay)


def epoch_rates(recipe: Optimiser, epoch: int, epochs: int, steps: int) -> list[float]:
    """The learning rate of every step of one epoch."""
    return [learning_rate(recipe, (epoch + i / steps) / epochs) for i in range(steps)]


def shuffled_batches(
    labels: NDArray[np.int64],
    batch_size: int,
    rng: np.random.Generator,
    balanced: bool = False,
    smallest: int = 2,
) -> Iterator[NDArray[np.int64]]:
    """Batches of shuffled indices for one epoch.

    Args:
        labels: Labels of all images.
        batch_size: Number of images in every batch but the last.
        rng: Random generator of the order.
        balanced: Whether to draw with replacement, every class equally often.
        smallest: Fewest images of a last batch that is not dropped; an only batch never is.
    """
    if balanced:
        weights = 1 / np.bincount(labels)[labels]
        order = rng.choice(len(labels), len(labels), p=weights / weights.sum())
    else:
        order = rng.permutation(len(labels))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        if len(batch) >= smallest or start == 0:
            yield batch


@lost_process_errors()
def run_epoch(
    accelerator: Accelerator,
    module: nn.Module,
    optimiser: Optimizer,
    loss_of: Callable[[nn.Module, Batch], Tensor],
    batches: Iterable[Batch],
    rates: Iterable[float],
) -> float:
    """Train for one epoch, with one step and one learning rate per batch; returns the mean loss.

    With several processes, each passes its own shares of the batches, and a loss that is weighted
    by them.
    """
    total, count = 0.0, 0
    for batch, rate in zip(batches, rates, strict=True):
        for group in optimiser.param_groups:
            group["lr"] = rate * group.get("scale", 1)
        loss = loss_of(module, batch)
        if not torch.isfinite(loss):
            cure = "Lower the learning rate: --set lr=... The last good epoch is saved."
            raise SettingError(f"the training diverged: the loss is {loss.item()}", cure=cure)
        optimiser.zero_grad(set_to_none=True)
        accelerator.backward(loss)
        optimiser.step()
        total, count = total + float(loss.detach()), count + 1
    mean = torch.tensor(total / max(count, 1), device=accelerator.device)
    return float(accelerator.reduce(mean, "mean"))


def check_folder(out: Path) -> None:
    """Refuse a folder that cannot be written to, before any work is done; nothing is created."""
    out = out.absolute()
    with storage_errors("cannot write", out):
        folder = out if os.path.lexists(out) else next(f for f in out.parents if os.path.lexists(f))
        tempfile.TemporaryFile(dir=folder).close()


def save_state(
    folder: Path, module: nn.Module, optimiser: Optimizer, epoch: int, job: dict[str, Any]
) -> None:
    """Save what the next epoch needs, in place of the previous state, in one step."""
    tensors = {f"module.{k}": v for k, v in module.state_dict().items()}
    for i, parameter in enumerate(_parameters(optimiser)):
        memory = optimiser.state.get(parameter, {})
        for name, key in _memory(optimiser).items():
            if memory.get(key) is not None:
                tensors[f"{name}.{i}"] = memory[key]
    save_folder(folder, KIND, {"epoch": epoch, "job": job}, {TENSORS: tensors})


def saved_epoch(folder: Path, job: dict[str, Any]) -> tuple[int, dict[str, Tensor]] | None:
    """The number of finished epochs and the tensors after them, or None if none is saved."""
    if not is_saved(folder):
        return None
    saved = read_folder(folder, KIND)
    check_same_job(folder.parent, job, saved.card["job"])
    return saved.card["epoch"], saved.file(TENSORS)


def clear_state(out: Path) -> None:
    """Remove the saved state, and what killed writers of 0.1.0 left, once the result is saved."""
    for folder in (out / STATE, out / f".{STATE}.old", *out.glob(f".{STATE}.????????")):
        shutil.rmtree(folder, ignore_errors=True)


def check_same_job(folder: Path, job: dict[str, Any], saved_job: dict[str, Any]) -> None:
    """Refuse to resume or return a training that was started with other settings."""
    new, old = _flat(job), _flat(saved_job)
    if changed := sorted(key for key in {*new, *old} if new.get(key) != old.get(key)):
        what = f"{folder} has a training with other settings ({', '.join(changed)})"
        raise CheckpointError(what, cure="Choose another folder, or remove that one.")


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


def restore_state(
    tensors: dict[str, Tensor], module: nn.Module, optimiser: Optimizer | None
) -> None:
    """Load the state that `save_state` saved; None for an optimiser that begins afresh."""
    weights = {k.removeprefix("module."): v for k, v in tensors.items() if k.startswith("module.")}
    with misfits("the state of the training", cure="Remove it: the training starts again."):
        module.load_state_dict(weights)
    for i, parameter in enumerate([] if optimiser is None else _parameters(optimiser)):
        assert optimiser is not None
        saved = {name: tensors.get(f"{name}.{i}") for name in _memory(optimiser)}
        if all(tensor is None for tensor in saved.values()):
            continue  # a weight that had no gradient
        for name, key in _memory(optimiser).items():
            # torch counts the steps of a weight on the CPU
            like: Tensor = torch.tensor(0.0) if name == "steps" else parameter
            fitting = _fitting(f"{name} of weight {i}", saved[name], like)
            optimiser.state[parameter][key] = fitting.to(like.device)


def _fitting(what: str, tensor: Tensor | None, like: Tensor) -> Tensor:
    if tensor is not None and (tensor.shape, tensor.dtype) == (like.shape, like.dtype):
        return tensor
    got = "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
    raise CheckpointError(what, must_be=f"{like.dtype} {tuple(like.shape)}", got=got)


def _memory(optimiser: Optimizer) -> dict[str, str]:
    optimiser = getattr(optimiser, "optimizer", optimiser)  # accelerate wraps it
    return MEMORY[type(optimiser)]


def _parameters(optimiser: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimiser.param_groups for p in group["params"]]
