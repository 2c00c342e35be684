"""The training loop that source models and adapters share: SGD, schedule, epochs, resuming.

All randomness of an epoch comes from (seed, epoch), so a run that was killed goes on from its
last epoch and ends with the weights of an undisturbed one. The loop runs through accelerate; for
several devices, see `twoshift.train.devices`.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from twoshift import priors
from twoshift.errors import CheckpointError, SettingError
from twoshift.storage import (
    atomic_folder,
    read_card,
    read_tensors,
    storage_errors,
    write_card,
    write_tensors,
)
from twoshift.train.devices import told_of_lost_ones
from twoshift.train.recipes import Optimiser

Batch = TypeVar("Batch")
Progress = Callable[[int, int, str], None]
KIND = "training state"
STATE = ".training"  # folder of the state, within that of the result


def silent(done: int, total: int, facts: str) -> None:
    """Report progress to nobody."""


def learning_rate(recipe: Optimiser, progress: float) -> float:
    """The learning rate when ``progress`` (0 to 1) of the training is done."""
    if recipe.schedule == "constant":
        return recipe.lr
    if recipe.schedule == "steps":
        done = progress * recipe.epochs + 1e-6  # 60 epochs of 90 are not quite 60 / 90 of them
        return recipe.lr * 0.1 ** sum(done >= m for m in recipe.milestones or ())
    if recipe.schedule == "cosine":
        return recipe.lr * 0.5 * (1 + math.cos(math.pi * progress))
    warm_up = 0.2  # one cycle: up for a fifth of the time, down to nothing for the rest
    if progress < warm_up:
        return recipe.lr * (0.04 + 0.96 * progress / warm_up)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))


def log_prior(class_counts: Sequence[int] | NDArray[np.int64], device: torch.device) -> Tensor:
    """Of the training labels; a class without images counts as half of one, to stay finite."""
    prior = np.maximum(priors.from_counts(class_counts), 0.5 / np.sum(class_counts))
    return torch.tensor(prior, dtype=torch.float32).log().to(device)


def make_optimiser(
    recipe: Optimiser, parameters: list[nn.Parameter] | list[dict[str, Any]]
) -> torch.optim.SGD:
    """SGD as the recipe says; the ``scale`` of a group is a factor on its learning rate."""
    return torch.optim.SGD(
        parameters,
        lr=recipe.lr,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov and recipe.momentum > 0,
        weight_decay=recipe.weight_decay,
    )


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
    """Indices of one epoch, shuffled.

    Args:
        labels: Of all images.
        batch_size: Of every batch but the last.
        rng: Decides the order.
        balanced: Draw every class equally often instead.
        smallest: A last batch of fewer images is left out, unless it is the only one.
    """
    if balanced:
        share = 1 / np.bincount(labels)[labels]
        order = rng.choice(len(labels), len(labels), p=share / share.sum())
    else:
        order = rng.permutation(len(labels))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        if len(batch) >= smallest or start == 0:
            yield batch


@told_of_lost_ones()
def run_epoch(
    accelerator: Accelerator,
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, Batch], Tensor],
    batches: Iterable[Batch],
    rates: Iterable[float],
) -> float:
    """One pass: a step per batch, at the given learning rates. Returns the mean loss.

    Of several processes, each brings its share of the batches, and the loss weighted by it.
    """
    total, count = 0.0, 0
    for batch, rate in zip(batches, rates, strict=True):
        for group in optimiser.param_groups:
            group["lr"] = rate * group.get("scale", 1)
        loss = loss_of(module, batch)
        if not torch.isfinite(loss):
            raise SettingError(
                f"the training diverged: the loss is {float(loss.detach())}",
                cure="Lower the learning rate: --set lr=... The last good epoch is kept.",
            )
        optimiser.zero_grad(set_to_none=True)
        accelerator.backward(loss)
        optimiser.step()
        total, count = total + float(loss.detach()), count + 1
    mean = torch.tensor(total / max(count, 1), device=accelerator.device)
    return float(accelerator.reduce(mean, "mean"))


def check_folder(out: Path) -> None:
    """Refuse, before any work is done, a folder that cannot take the result."""
    with storage_errors("cannot write", out):
        out.mkdir(parents=True, exist_ok=True)
        for folder in (out, out.absolute().parent):  # the result is made beside its place
            tempfile.TemporaryFile(dir=folder).close()


def save_state(
    folder: Path,
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    epoch: int,
    job: dict[str, Any],
) -> None:
    """Keep what the next epoch needs; replaces the state before it, atomically."""
    tensors = {f"module.{k}": v for k, v in module.state_dict().items()}
    for i, parameter in enumerate(_parameters(optimiser)):
        buffer = optimiser.state.get(parameter, {}).get("momentum_buffer")
        if buffer is not None:
            tensors[f"momentum.{i}"] = buffer
    with atomic_folder(folder) as temporary:
        write_tensors(temporary / "state.safetensors", tensors)
        write_card(temporary, {"kind": KIND, "epoch": epoch, "job": job})


def saved_epoch(folder: Path, job: dict[str, Any]) -> tuple[int, dict[str, Tensor]] | None:
    """The last finished epoch and its tensors, or None where nothing was begun."""
    aside = folder.with_name(f".{folder.name}.old")  # killed between atomic_folder's two renames
    if not folder.exists() and not aside.exists():
        return None
    card = read_card(folder, KIND)
    check_same_job(folder.parent, job, card["job"])
    return card["epoch"], read_tensors(card["folder"] / "state.safetensors")


def clear_state(out: Path) -> None:
    """Remove what resuming needed, also what killed writers left, once the result is there."""
    for folder in out.glob(f"*{STATE}*"):
        shutil.rmtree(folder, ignore_errors=True)


def check_same_job(folder: Path, job: dict[str, Any], found: dict[str, Any]) -> None:
    """Refuse to go on with, or hand out, the work of other settings."""
    wanted, there = _flat(job), _flat(found)
    changed = sorted(k for k in {*wanted, *there} if wanted.get(k) != there.get(k))
    if changed:
        raise CheckpointError(
            f"{folder} holds a training with other settings ({', '.join(changed)})",
            cure="Choose another folder, or remove that one.",
        )


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(item) if isinstance(item, tuple) else item
    return flat


def restore_state(
    tensors: dict[str, Tensor], module: nn.Module, optimiser: torch.optim.Optimizer
) -> None:
    """Put back what `save_state` kept."""
    module.load_state_dict(
        {k.removeprefix("module."): v for k, v in tensors.items() if k.startswith("module.")}
    )
    for i, parameter in enumerate(_parameters(optimiser)):
        if (buffer := tensors.get(f"momentum.{i}")) is not None:
            optimiser.state[parameter]["momentum_buffer"] = buffer.to(parameter.device)


def _parameters(optimiser: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimiser.param_groups for p in group["params"]]
