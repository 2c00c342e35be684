"""Training images that a long-tailed source model has not seen: to choose settings on.

Settings are never chosen on test images. What the long-tailed subset leaves out is free for it, but
its most frequent class is kept whole, so of that one the images are the model's own; results made
with these sets decide settings and are no results.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from twoshift.data.base import ImageSet, datasets
from twoshift.data.cifar import CIFAR10, CIFAR100, Cifar, load_cifar
from twoshift.data.long_tail import long_tailed_indices, outside
from twoshift.errors import SettingError

RATIO = 100.0  # of the subset that recipes take


@datasets.register("cifar10_outside")
def cifar10_outside(split: str, root: Path) -> ImageSet:
    """CIFAR-10: 600 images of every class, outside the long-tailed subset where there are any."""
    return _outside(CIFAR10, split, root, 600)


@datasets.register("cifar100_outside")
def cifar100_outside(split: str, root: Path) -> ImageSet:
    """CIFAR-100: 60 images of every class, outside the long-tailed subset where there are any."""
    return _outside(CIFAR100, split, root, 60)


def _outside(facts: Cifar, split: str, root: Path, per_class: int) -> ImageSet:
    if split != "test":
        raise SettingError(
            f"split of {facts.name}_outside",
            must_be="'test': to train on it would be to give it away",
            got=repr(split),
        )
    full = load_cifar(facts, "train", root)
    used = long_tailed_indices(full.labels, RATIO)
    unseen = outside(full.labels, used)
    rng, rows, short = np.random.default_rng(0), [], []
    for c, name in enumerate(facts.classes):
        own = unseen[full.labels[unseen] == c]
        if len(own) < per_class:
            short.append(name)
            own = np.concatenate([own, used[full.labels[used] == c][: per_class - len(own)]])
        rows.append(rng.permutation(own)[:per_class])
    told = f"{facts.name} training images outside the long-tailed subset"
    if short:
        told += f", in part the model's own of {', '.join(short)}"
    return replace(full.subset(np.concatenate(rows)), split=split, origin=told)
