"""Images stored between batches: the reservoir of NOTE, and helpers for other such methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from twoshift.errors import BatchError, MismatchError
from twoshift.methods._batch import checked
from twoshift.methods._inputs import Inputs

LARGEST = 1e12  # squares, summed over channels and positions, stay finite


def place(
    label: int, labels: list[int], arrivals: Counter[int], capacity: int, generator: torch.Generator
) -> int | None:
    """Prediction-balanced reservoir sampling: the slot of a new image, or None if it is dropped.

    While there is room it is appended. Later it takes the place of a random image of one of the
    largest classes or, if its own class is one of them, of a random image of its own class, with
    the probability that makes every arrival of the class equally likely to be stored.

    Draws, in this order: where its class is among the largest, a number in [0, 1) for being stored
    at all, else the index of the class that gives way, in ascending order of the largest; then
    the index of the image among those of that class, in order of their slots.

    Args:
        label: The predicted class of the new image.
        labels: The predicted class in every slot; updated in place.
        arrivals: How many images of each class have arrived; updated in place.
        capacity: Number of slots.
        generator: The source of the draws.
    """
    arrivals[label] += 1
    if len(labels) < capacity:
        labels.append(label)
        return len(labels) - 1
    sizes = Counter(labels)
    most = max(sizes.values())
    largest = sorted(c for c, size in sizes.items() if size == most)
    leaving = label
    if label not in largest:
        leaving = largest[_below(len(largest), generator)]
    elif torch.rand(1, generator=generator).item() >= most / arrivals[label]:
        return None
    slots = [slot for slot, c in enumerate(labels) if c == leaving]
    slot = slots[_below(len(slots), generator)]
    labels[slot] = label
    return slot


def _below(n: int, generator: torch.Generator) -> int:
    return int(torch.randint(n, (1,), generator=generator))


def between_updates(x: Tensor, waiting: int, every: int) -> list[Tensor]:
    """Cut a batch at the updates: after every ``every`` images, including those ``waiting``."""
    first = every - waiting
    return [x[:first], *(x[first:].split(every) if len(x) > first else ())]


def in_layout_of(x: Tensor, images: Tensor) -> Tensor:
    """Images in the memory layout of ``x``: files lose it, and it decides the last bits."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    return images.contiguous(memory_format=layout)


def check_keepable(x: Tensor) -> None:
    """Refuse images that would make a later update fail: by then they are part of the state."""
    if x.abs().max() > LARGEST:
        raise BatchError(
            "a batch",
            must_be=f"of pixels below {LARGEST:g}, so that their variance is finite",
            got=f"{x.abs().max():g}",
            cure="Check the range of the images (usually [0, 1]).",
        )


def of_one_size(
    memory: dict[str, Tensor], name: str, x: Tensor, inputs: Inputs | None
) -> dict[str, Tensor]:
    """The memory, if its images under ``name`` have the size of those of a batch.

    Where the size is known, it is the memory that is wrong: it is forgotten.
    """
    if name not in memory or memory[name].shape[1:] == x.shape[1:]:
        return memory
    if inputs is not None and inputs.size is not None:
        return {}
    raise BatchError(
        "a batch",
        must_be=f"of shape (B, {', '.join(map(str, memory[name].shape[1:]))}), like the images "
        "that the method remembers",
        got=f"{tuple(x.shape)}",
        cure="Say which size is right: live.expect(Inputs(size=(H, W))) forgets images of another "
        "size; live.reset() forgets everything.",
    )


def check_stored(
    model: nn.Module,
    inputs: Inputs | None,
    memory: Mapping[str, Tensor],
    names: Collection[str],
    most: int,
) -> int:
    """The number of images in a saved memory, whose first name is theirs; a bad one is refused.

    Args:
        model: The classifier that takes the images.
        inputs: What is known about them.
        memory: The saved memory.
        names: What it must hold.
        most: Largest number of images.
    """
    if memory.keys() != set(names):
        raise MismatchError("memory of a state", must_be=sorted(names), got=sorted(memory))
    name = next(iter(names))
    images = memory[name]
    try:
        checked(images, model, inputs)
        check_keepable(images)
    except BatchError as e:
        raise MismatchError(f"state of memory.{name}: {e}") from e
    if len(images) > most:
        raise MismatchError(
            f"state of memory.{name}", must_be=f"at most {most} images", got=len(images)
        )
    return len(images)


def check_facts(
    name: str, values: Tensor, shape: tuple[int, ...], below: int | None = None
) -> None:
    """Refuse saved facts about images that have another shape or impossible values.

    Args:
        name: Their name in the memory.
        values: The facts.
        shape: The shape that they must have.
        below: Each must be at least 0 and below this; any value will do if None.
    """
    if values.shape != shape:
        raise MismatchError(f"state of memory.{name}", must_be=shape, got=tuple(values.shape))
    if below is not None and ((values < 0) | (values >= below)).any():
        raise MismatchError(f"state of memory.{name}", must_be=f"at least 0 and below {below}")
