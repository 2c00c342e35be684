"""Images kept between batches: NOTE's reservoir, and what all methods that keep images need."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from twoshift.errors import BatchError

LARGEST = 1e12  # squares, summed over channels and positions, stay finite


def place(
    label: int, kept: list[int], arrivals: Counter[int], capacity: int, generator: torch.Generator
) -> int | None:
    """Prediction-balanced reservoir sampling: where a newcomer goes, or None if it is not kept.

    While there is room it is appended. Later it takes the place of a random image of one of the
    largest classes or, if its own class is one of them, of a random image of its own class, with
    the probability that keeps all arrivals of the class equally likely to be there.

    Draws, in this order: where its class is among the largest, a number in [0, 1) for being kept
    at all, else the index of the class that gives way, in ascending order of the largest; then
    the index of the image among those of that class, in order of their slots.

    Args:
        label: The newcomer's predicted class.
        kept: The class in every slot; written to.
        arrivals: How many of each class have arrived; written to.
        capacity: Number of slots.
        generator: Where the draws come from.
    """
    arrivals[label] += 1
    if len(kept) < capacity:
        kept.append(label)
        return len(kept) - 1
    sizes = Counter(kept)
    most = max(sizes.values())
    largest = sorted(c for c, size in sizes.items() if size == most)
    leaving = label
    if label not in largest:
        leaving = largest[_below(len(largest), generator)]
    elif torch.rand(1, generator=generator).item() >= most / arrivals[label]:
        return None
    slots = [slot for slot, c in enumerate(kept) if c == leaving]
    slot = slots[_below(len(slots), generator)]
    kept[slot] = label
    return slot


def _below(n: int, generator: torch.Generator) -> int:
    return int(torch.randint(n, (1,), generator=generator))


def between_updates(x: Tensor, waiting: int, every: int) -> list[Tensor]:
    """Cut a batch where updates fall: after every ``every`` images, ``waiting`` counted in."""
    first = every - waiting
    return [x[:first], *(x[first:].split(every) if len(x) > first else ())]


def in_layout_of(x: Tensor, images: Tensor) -> Tensor:
    """Channels last where ``x`` is: a file forgets it, and another layout has other last bits."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    return images.contiguous(memory_format=layout)


def check_keepable(x: Tensor) -> None:
    """Refuse now what could not be learnt from later: by then it would be part of the state."""
    if x.abs().max() > LARGEST:
        raise BatchError(
            "a batch",
            must_be=f"of pixels below {LARGEST:g}, so that their variance is finite",
            got=f"{x.abs().max():g}",
            cure="Check the range of the images (usually [0, 1]).",
        )
