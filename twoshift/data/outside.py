"""Training images that a long-tailed source model was not trained on, for choosing settings.

Settings are never chosen on test images. Images that the long-tailed subset leaves out can be used
instead. The subset contains every image of its most frequent class, so for that class the model's
own training images are used. Numbers measured on these sets choose settings; do not report them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from twoshift.data.base import ImageSet, datasets
from twoshift.data.cifar import CIFAR10, CIFAR100, Cifar, load_cifar
from twoshift.data.long_tail import long_tailed_indices, outside
from twoshift.errors import SettingError

RATIO = 100.0  # imbalance ratio of the subset that the recipes train on


@datasets.register("cifar10_outside")
def cifar10_outside(split: str, root: Path) -> ImageSet:
    """CIFAR-10: 600 training images per class, from outside the long-tailed subset if possible."""
    return _outside(CIFAR10, split, root, 600)


@datasets.register("cifar100_outside")
def cifar100_outside(split: str, root: Path) -> ImageSet:
    """CIFAR-100: 60 training images per class, from outside the long-tailed subset if possible."""
    return _outside(CIFAR100, split, root, 60)


def _outside(facts: Cifar, split: str, root: Path, per_class: int) -> ImageSet:
    if split != "test":
        raise SettingError(
            f"split of {facts.name}_outside",
            must_be="'test', because settings must be chosen on images outside of the training",
            got=repr(split),
        )
    full = load_cifar(facts, "train", root)
    training = long_tailed_indices(full.labels, RATIO)
    remainder = outside(full.labels, training)
    rng, rows, short_classes = np.random.default_rng(0), [], []
    for c, name in enumerate(facts.classes):
        pool = remainder[full.labels[remainder] == c]
        if len(pool) < per_class:
            short_classes.append(name)
            filler = training[full.labels[training] == c][: per_class - len(pool)]
            pool = np.concatenate([pool, filler])
        rows.append(rng.permutation(pool)[:per_class])
    origin = f"{facts.name} training images outside the long-tailed subset"
    if short_classes:
        origin += f", and inside of it for {', '.join(short_classes)}"
    return replace(full.subset(np.concatenate(rows)), split=split, origin=origin)
