"""Long-tailed subsets: how many images of every class they have, and which ones.

The exponential and step profiles and the draw follow Cao et al., "Learning Imbalanced Datasets with
Label-Distribution-Aware Margin Loss", https://arxiv.org/abs/1906.07413, so that seed 0 picks the
published subsets: 12,406 images of CIFAR-10 and 10,847 of CIFAR-100 at ratio 100. The Pareto
profile has power 6 as in ImageNet-LT, Liu et al., https://arxiv.org/abs/1904.05160.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from twoshift.errors import DataError, SettingError
from twoshift.priors import class_order
from twoshift.registry import near_miss

Profile = Literal["exponential", "pareto", "step"]
ClassOrder = Literal["index", "size"] | Sequence[int]

_PARETO_POWER = 6.0

# 49 * (1 / 49) is just below 1 and must not become 0; no CIFAR subset of an integer ratio changes
_ROUNDING = 1 + 1e-12


def class_counts(profile: Profile, largest: int, classes: int, ratio: float) -> NDArray[np.int64]:
    """Number of images of every class; class 0 is the most frequent one.

    For class ``i`` of ``C``, rounded down:

    - exponential: ``largest * (1 / ratio) ** (i / (C - 1))``
    - step: ``largest`` for the first half of the classes, ``largest / ratio`` for the second
    - pareto: the quantiles ``q_i = ((i + 1) / C) ** (-1 / 6)`` of a Pareto distribution, stretched
      linearly so that the first class has ``largest`` images and the last ``largest / ratio``. Like
      ImageNet-LT (1000 classes of 1280 to 5 images) it gives about 120 images per class; that set
      was drawn at random, so its exact counts are only in its own lists.

    Args:
        profile: Shape of the tail.
        largest: Number of images of the most frequent class.
        classes: Number of classes.
        ratio: Number of images of the most frequent class over that of the rarest one.
    """
    _check_shape(profile, ratio)
    if classes < 1 or largest < 1:
        raise DataError(
            "a long-tailed set",
            must_be="of at least one class and one image",
            got=f"{classes} classes, {largest} images in the largest",
        )
    counts = _rounded(_sizes(profile, largest, classes, ratio))
    if counts.min() < 1:
        raise DataError(
            f"ratio {ratio:g} leaves {int((counts < 1).sum())} of {classes} classes without images",
            must_be=f"at most {largest}, the number of images of the largest class",
            cure="Choose a smaller ratio.",
        )
    return counts


def _check_shape(profile: Profile, ratio: float) -> None:
    if profile not in get_args(Profile):
        cure = near_miss(profile, get_args(Profile))
        raise SettingError(f"unknown long-tail profile {profile!r}", cure=cure)
    if not 1 <= ratio < float("inf"):
        raise DataError("imbalance ratio", must_be="at least 1 and finite", got=ratio)


def _rounded(sizes: Sequence[float]) -> NDArray[np.int64]:
    return np.array([int(size * _ROUNDING) for size in sizes], np.int64)


def _sizes(profile: Profile, largest: int, classes: int, ratio: float) -> list[float]:
    # plain floats in the published order of operations: numpy's power may round differently
    smallest = largest / ratio
    if profile == "step":
        frequent = (classes + 1) // 2
        return [largest] * frequent + [smallest] * (classes - frequent)
    if classes == 1:
        return [largest]
    if profile == "exponential":
        return [largest * (1 / ratio) ** (i / (classes - 1)) for i in range(classes)]
    quantiles = [((i + 1) / classes) ** (-1 / _PARETO_POWER) for i in range(classes)]
    heights = [(q - 1) / (quantiles[0] - 1) for q in quantiles]  # 1 down to 0
    return [largest - (1 - h) * (largest - smallest) for h in heights]  # exact at both ends


def long_tailed_indices(
    labels: NDArray[np.int64],
    ratio: float,
    profile: Profile = "exponential",
    seed: int = 0,
    order: ClassOrder = "index",
) -> NDArray[np.int64]:
    """Indices of a long-tailed subset, sorted by class.

    The subset of a balanced set contains all images of its first class. If classes have different
    sizes, the subset is the largest one with this profile for which every class has enough images.
    Ratio 1 keeps all images, whatever the class sizes.

    Args:
        labels: Labels of the full set; the classes are 0 to the largest label.
        ratio: Number of images of the most frequent class over that of the rarest one.
        profile: Shape of the tail, see `class_counts`.
        seed: Seed of the draw; 0 gives the published subset.
        order: Order of the classes from head to tail: ``"index"``, ``"size"`` or a permutation.
    """
    labels = _check_labels(labels)
    present = counts = np.bincount(labels)
    if ratio != 1:
        ranked = _ranked(order, present)
        counts = np.empty_like(present)
        counts[ranked] = _largest_tail(profile, present[ranked], ratio)
    rng = np.random.RandomState(seed)  # the legacy generator: only it draws the published subsets
    rows = []
    for label, count in enumerate(counts):
        members = np.flatnonzero(labels == label)
        rng.shuffle(members)
        rows.append(members[:count])
    return np.concatenate(rows).astype(np.int64)


def _ranked(order: ClassOrder, present: NDArray[np.int64]) -> NDArray[np.int64]:
    """The classes from head to tail."""
    classes = np.arange(len(present))
    if order == "index":
        return classes
    if order == "size":
        return class_order(present)
    permutation = np.asarray(order)
    if isinstance(order, str) or not np.array_equal(np.sort(permutation), classes):
        raise SettingError(
            "order of the classes", must_be="index, size, or a permutation", got=repr(order)
        )
    return permutation.astype(np.int64)


def _largest_tail(profile: Profile, present: NDArray[np.int64], ratio: float) -> NDArray[np.int64]:
    """Class counts, head first, of the largest tail that the counts in ``present`` allow."""
    _check_shape(profile, ratio)
    if not present.all():
        raise DataError(
            f"{int((present == 0).sum())} of {len(present)} classes have no images",
            must_be="at least one image in every class of a long tail",
            cure="Leave these classes out, or keep all images with ratio 1.",
        )
    shape = np.array(_sizes(profile, 1, len(present), ratio))
    head = int(((present + 1) / shape).min())  # at most one too large, by rounding down
    while head > 1 and (_rounded(_sizes(profile, head, len(present), ratio)) > present).any():
        head -= 1
    return class_counts(profile, head, len(present), ratio)


def outside(labels: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of all images that are not in a subset, in ascending order."""
    if len(indices) and not 0 <= indices.min() <= indices.max() < len(labels):
        must_be, got = f"from 0 to {len(labels) - 1}", f"{indices.min()} to {indices.max()}"
        raise DataError("indices of a subset", must_be=must_be, got=got)
    return np.setdiff1d(np.arange(len(labels)), indices)


def _check_labels(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.size == 0 or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise DataError(
            "labels",
            must_be="a non-empty vector of class numbers",
            got=f"{labels.dtype} of shape {labels.shape}",
        )
    return labels.astype(np.int64, copy=False)
