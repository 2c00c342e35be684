"""Runs cells: finds or trains their models, and keeps models and images in memory."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twoshift.adapters import Adapter, load_adapter
from twoshift.bench.cell import TRAINED, Cell, Model
from twoshift.bench.images import ImageCache, Recent
from twoshift.bench.keys import keyed_adapter, keyed_source
from twoshift.bench.measure import run_cell
from twoshift.bench.result import Result
from twoshift.errors import CheckpointError, SettingError
from twoshift.storage import CARD, read_card
from twoshift.train.adapter import train_adapter, training_of
from twoshift.train.checkpoint import SourceModel, load_source
from twoshift.train.recipes import AdapterRecipe, SourceRecipe
from twoshift.train.source import train_source

Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """No progress."""


@dataclass
class Workshop:
    """Runs cells.

    A model that is in one of the folders is used, under any name. A missing one is trained in
    ``models``, once, even if several processes need it.

    Attributes:
        models: Folder of source models and adapters.
        data: Root of the data sets.
        also: More folders with trained models; they are only read.
        skip_bad: Leave out images that cannot be decoded, in trainings and streams; cards and
            results count them.
        images: The test images of the cells run here.
    """

    models: Path
    data: Path | None = None
    also: Sequence[Path] = ()
    skip_bad: bool = False
    images: ImageCache = field(init=False, repr=False, compare=False)
    _sources: Recent[SourceModel] = field(default_factory=Recent, repr=False, compare=False)
    _adapters: Recent[Adapter] = field(default_factory=Recent, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.images = ImageCache(self.data, self.skip_bad)

    def run(self, cell: Cell, progress: Progress = silent) -> Result:
        """The result of a cell."""
        return run_cell(cell, *self.models_of(cell), images=self.images, progress=progress)

    def models_of(self, cell: Cell) -> tuple[SourceModel, Adapter | None]:
        """The source model of a cell, and its trained adapter if it uses one."""
        if cell.model is None:
            raise SettingError("the model of a cell to run", must_be="given by recipe", got="none")
        adapter = self.adapter(cell.model) if cell.adapter == TRAINED else None
        return self.source(cell.model), adapter

    def source(self, model: Model) -> SourceModel:
        """The source model; trained if no folder has it."""
        return self._sources.get(model.source_key, lambda: self._source(model))

    def adapter(self, model: Model) -> Adapter:
        """The adapter; trained if no folder has it."""
        if model.adapter is None:
            raise SettingError("the recipe of a trained adapter", must_be="given", got="none")
        return self._adapters.get(model.adapter_key, lambda: self._adapter(model))

    def missing(self, model: Model, adapter: bool) -> bool:
        """Whether the source model, or the adapter if it is needed, is not trained yet."""
        if self._find_source(model) is None:
            return True
        return adapter and self._find_adapter(model, self.source(model).weights) is None

    def _source(self, model: Model) -> SourceModel:
        recipe = SourceRecipe.model_validate(model.source)
        folder = self.models / f"{_file_name(recipe.dataset)}-{model.source_key[:12]}"
        with _alone(folder):
            if trained := self._find_source(model):
                return load_source(trained)
            return train_source(
                recipe, folder, seed=model.seed, data=self.data, skip_bad=self.skip_bad
            )

    def _adapter(self, model: Model) -> Adapter:
        source, recipe = self.source(model), AdapterRecipe.model_validate(model.adapter)
        name = _file_name(source.card.dataset)
        folder = self.models / f"{name}-{model.adapter_key[:12]}-adapter"
        with _alone(folder):
            if trained := self._find_adapter(model, source.weights):
                return load_adapter(trained)
            return train_adapter(source, recipe, folder, seed=model.seed, data=self.data)

    def _find_source(self, model: Model) -> Path | None:
        wanted = keyed_source(SourceRecipe.model_validate(model.source).model_dump()), model.seed
        return self._find(
            "source model", lambda card: (keyed_source(card["recipe"]), card["seed"]) == wanted
        )

    def _find_adapter(self, model: Model, weights: str) -> Path | None:
        recipe = keyed_adapter(AdapterRecipe.model_validate(model.adapter).model_dump())

        def fits(card: dict[str, Any]) -> bool:
            job = training_of(card) or {"recipe": {}}
            same_training = (job.get("source"), job.get("seed")) == (weights, model.seed)
            return same_training and keyed_adapter(job.get("recipe", {})) == recipe

        return self._find("adapter", fits)

    def _find(self, kind: str, fits: Callable[[dict[str, Any]], bool]) -> Path | None:
        for root in (self.models, *self.also):
            for path in sorted(root.glob(f"*/{CARD}")):
                try:
                    card = read_card(path.parent, kind)
                except CheckpointError:
                    continue  # another kind of folder, or damaged
                if fits(card):
                    return path.parent
        return None


def _file_name(dataset: str) -> str:
    """A data set's name, as a part of a folder's name."""
    return re.sub(r"[^\w.]+", "-", dataset)[-60:]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock a folder: other processes wait, and then find the work done."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
