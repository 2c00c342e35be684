"""The test images of cells, kept in memory while several cells use them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from twoshift.bench.cell import Cell
from twoshift.data import load
from twoshift.data.base import ImageSet
from twoshift.data.corrupted import corrupted
from twoshift.data.files import drop_bad
from twoshift.train.checkpoint import SourceModel

T = TypeVar("T")
KEPT = 4


class Recent(Generic[T]):
    """Keeps what was used last; a pickled copy is empty, so that no memory travels.

    Args:
        size: How many to keep.
    """

    def __init__(self, size: int = KEPT) -> None:
        self._size = size
        self._items: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The item of this key, made if it is not there."""
        item = self._items.pop(key) if key in self._items else make()
        while len(self._items) >= self._size:
            self._items.popitem(last=False)
        self._items[key] = item  # as the latest
        return item

    def __len__(self) -> int:
        return len(self._items)

    def __getstate__(self) -> dict[str, Any]:
        return {"_size": self._size, "_items": OrderedDict()}


@dataclass
class ImageCache:
    """Loads and corrupts the test images of cells.

    Attributes:
        data: Root of the data sets.
        skip_bad: Leave out images that cannot be decoded; the image set counts them.
    """

    data: str | Path | None = None
    skip_bad: bool = False
    _clean: Recent[ImageSet] = field(default_factory=Recent, repr=False, compare=False)
    _corrupted: Recent[ImageSet] = field(default_factory=Recent, repr=False, compare=False)
    _joined: Recent[tuple[ImageSet, ...]] = field(
        default_factory=lambda: Recent(1), repr=False, compare=False
    )

    def of(self, cell: Cell, source: SourceModel) -> ImageSet | tuple[ImageSet, ...]:
        """The images of a cell, corrupted, decoded and with classes numbered as in training.

        Of corruptions that follow one another, the whole set under each: corrupted images are
        mapped from files, and a stream reads only those that it shows.
        """
        if len(cell.corruptions) == 1:
            return self._single(cell, source)
        each = [replace(cell, corruption=name) for name in cell.corruptions]
        key = self._key(cell, source)
        return self._joined.get(key, lambda: tuple(self._single(one, source) for one in each))

    def _key(self, cell: Cell, source: SourceModel) -> Hashable:
        card = source.card
        decoding = repr(card.recipe.get("decoding", {}))
        pixels = (cell.target or card.dataset, decoding, tuple(card.classes))
        return *pixels, cell.corruption, cell.severity

    def _single(self, cell: Cell, source: SourceModel) -> ImageSet:
        card = source.card
        decoding = card.recipe.get("decoding", {})
        pixels = (cell.target or card.dataset, repr(decoding))

        def load_clean() -> ImageSet:
            images = load(pixels[0], "test", self.data, **decoding)
            return drop_bad(images) if self.skip_bad else images

        def corrupt() -> ImageSet:
            clean = self._clean.get(pixels, load_clean)
            images = corrupted(clean, cell.corruption, cell.severity, root=self.data)
            if self.skip_bad and images is not clean:  # published files may be bad, too
                images = drop_bad(images)
            return images.aligned(card.classes)

        return self._corrupted.get(self._key(cell, source), corrupt)
