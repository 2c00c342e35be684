"""The test images of cells."""

from __future__ import annotations

from pathlib import Path

from twoshift.bench.cell import Cell
from twoshift.data import load
from twoshift.data.base import ImageSet
from twoshift.data.corrupted import corrupted
from twoshift.data.files import drop_bad
from twoshift.train.checkpoint import SourceModel


def clean_images_of(
    cell: Cell, source: SourceModel, data: str | Path | None = None, *, skip_bad: bool = False
) -> ImageSet:
    """The test images of a cell before the corruption, decoded as those of the training were."""
    decoding = source.card.recipe.get("decoding", {})
    clean = load(cell.target or source.card.dataset, "test", data, **decoding)
    return drop_bad(clean) if skip_bad else clean


def images_of(
    cell: Cell,
    source: SourceModel,
    data: str | Path | None = None,
    *,
    skip_bad: bool = False,
    clean: ImageSet | None = None,
) -> ImageSet:
    """The test images of a cell, corrupted.

    Args:
        cell: Whose.
        source: Its model; images are decoded and classes numbered as in its training.
        data: Root of the data sets.
        skip_bad: Leave images out that cannot be decoded; the set counts them.
        clean: What `clean_images_of` gives, where the caller keeps it.
    """
    if clean is None:
        clean = clean_images_of(cell, source, data, skip_bad=skip_bad)
    images = corrupted(clean, cell.corruption, cell.severity, root=data)
    if skip_bad and images is not clean:  # published files may be bad, too
        images = drop_bad(images)
    return images.aligned(source.card.classes)
