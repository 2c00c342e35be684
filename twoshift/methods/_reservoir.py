"""Images stored between batches: the reservoir of NOTE, and helpers for other such methods."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from twoshift.errors import BatchError

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
