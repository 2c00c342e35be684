"""Where cells are run: finds or trains their models, and keeps models and images in memory."""

from __future__ import annotations

import fcntl
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from twoshift.adapters import Adapter, load_adapter
from twoshift.bench.cell import TRAINED, Cell, Model
from twoshift.bench.images import clean_images_of, images_of
from twoshift.bench.measure import run_cell
from twoshift.bench.result import Result
from twoshift.data.base import ImageSet
from twoshift.errors import CheckpointError, SettingError
from twoshift.storage import CARD, read_card
from twoshift.train.adapter import train_adapter, training_of
from twoshift.train.checkpoint import SourceModel, load_source
from twoshift.train.recipes import AdapterRecipe, SourceRecipe
from twoshift.train.source import train_source

T = TypeVar("T")
MODELS_KEPT, IMAGES_KEPT = 4, 4
Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """No progress."""


@dataclass
class Workshop:
    """Runs cells.

    Models that are in one of the folders are used, whatever they are called there; others are
    trained in ``models``, once, even if several processes want them.

    Attributes:
        models: Folder of source models and adapters.
        data: Root of the data sets.
        also: More folders with trained models; only read.
        skip_bad: Leave images out that cannot be decoded, of trainings and of streams; cards and
            results count them.
    """

    models: Path
    data: Path | None = None
    also: Sequence[Path] = ()
    skip_bad: bool = False
    _sources: OrderedDict[str, SourceModel] = field(default_factory=OrderedDict, repr=False)
    _adapters: OrderedDict[str, Adapter] = field(default_factory=OrderedDict, repr=False)
    _clean: OrderedDict[tuple[Any, ...], ImageSet] = field(default_factory=OrderedDict, repr=False)
    _images: OrderedDict[tuple[Any, ...], ImageSet] = field(default_factory=OrderedDict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Memory does not travel: another process fills its own as it works."""
        memories = ("_sources", "_adapters", "_clean", "_images")
        return {**vars(self)} | {memory: OrderedDict() for memory in memories}

    def run(self, cell: Cell, progress: Progress = silent) -> Result:
        """The result of a cell."""
        if cell.model is None:
            raise SettingError("a cell to be run by itself", must_be="given a model by recipe")
        source = self.source(cell.model)
        adapter = self.adapter(cell.model) if cell.adapter == TRAINED else None
        images = self.images(cell, source)
        return run_cell(cell, source, adapter, data=self.data, images=images, progress=progress)

    def source(self, model: Model) -> SourceModel:
        """The source model, trained if it is nowhere."""
        return _kept(self._sources, model.source_key, MODELS_KEPT, lambda: self._source(model))

    def adapter(self, model: Model) -> Adapter:
        """The adapter, trained if it is nowhere."""
        if model.adapter is None:
            raise SettingError("a cell with a trained adapter", must_be="given its recipe")
        return _kept(self._adapters, model.adapter_key, MODELS_KEPT, lambda: self._adapter(model))

    def images(self, cell: Cell, source: SourceModel) -> ImageSet:
        """The test images of a cell, corrupted."""
        card = source.card
        pixels = (cell.target or card.dataset, repr(card.recipe.get("decoding")))

        def load_clean() -> ImageSet:
            return clean_images_of(cell, source, self.data, skip_bad=self.skip_bad)

        def make() -> ImageSet:
            clean = _kept(self._clean, pixels, IMAGES_KEPT, load_clean)
            return images_of(cell, source, self.data, skip_bad=self.skip_bad, clean=clean)

        key = (*pixels, tuple(card.classes), cell.corruption, cell.severity)
        return _kept(self._images, key, IMAGES_KEPT, make)

    def missing(self, model: Model, adapter: bool) -> bool:
        """Whether something would have to be trained first."""
        if self._find_source(model) is None:
            return True
        return adapter and self._find_adapter(model, self.source(model).weights) is None

    def _source(self, model: Model) -> SourceModel:
        recipe = SourceRecipe.model_validate(model.source)
        folder = self.models / f"{_file_name(recipe.dataset)}-{model.source_key[:12]}"
        with _alone(folder):
            if found := self._find_source(model):
                return load_source(found)
            return train_source(
                recipe, folder, seed=model.seed, data=self.data, skip_bad=self.skip_bad
            )

    def _adapter(self, model: Model) -> Adapter:
        source, recipe = self.source(model), AdapterRecipe.model_validate(model.adapter)
        name = _file_name(source.card.dataset)
        folder = self.models / f"{name}-{model.adapter_key[:12]}-adapter"
        with _alone(folder):
            found = self._find_adapter(model, source.weights)
            return (
                load_adapter(found)
                if found
                else train_adapter(source, recipe, folder, seed=model.seed, data=self.data)
            )

    def _find_source(self, model: Model) -> Path | None:
        wanted = SourceRecipe.model_validate(model.source).model_dump()
        return self._find(
            "source model", lambda card: (card["recipe"], card["seed"]) == (wanted, model.seed)
        )

    def _find_adapter(self, model: Model, weights: str) -> Path | None:
        recipe = AdapterRecipe.model_validate(model.adapter).model_dump()
        job = {"recipe": recipe, "seed": model.seed, "source": weights}
        return self._find("adapter", lambda card: training_of(card) == job)

    def _find(self, kind: str, fits: Callable[[dict[str, Any]], bool]) -> Path | None:
        for root in (self.models, *self.also):
            for path in sorted(root.glob(f"*/{CARD}")):
                try:
                    card = read_card(path.parent, kind)
                except CheckpointError:
                    continue  # of another kind, or damaged: not what was looked for
                if fits(card):
                    return path.parent
        return None


def _file_name(dataset: str) -> str:
    """A data set's name without what a folder cannot be called."""
    return re.sub(r"[^\w.]+", "-", dataset)[-60:]


def _kept(memory: OrderedDict[Any, T], key: Any, most: int, make: Callable[[], T]) -> T:
    """From memory, or made and remembered; the one used longest ago is forgotten."""
    if key not in memory:
        made = make()
        while len(memory) >= most:
            memory.popitem(last=False)
        memory[key] = made
    memory.move_to_end(key)
    return memory[key]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time; the others wait, and find the work done."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
