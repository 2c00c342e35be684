"""Keys of cells, and the workshop that finds, trains and keeps what they need."""

import json
import pickle
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context

import pytest

from twoshift.bench import images
from twoshift.bench import workshop as module
from twoshift.bench.cell import Cell, Model, cell_from
from twoshift.bench.workshop import Workshop
from twoshift.errors import SettingError, UnknownName
from twoshift.train.recipes import AdapterRecipe, SourceRecipe, load_recipe


def small_model(**changes):
    source = load_recipe(
        SourceRecipe, "demo", **{"dataset": "digits8x8", "ratio": 10, "epochs": 1, **changes}
    )
    return Model(source.model_dump(), load_recipe(AdapterRecipe, "demo", epochs=1).model_dump())


MODEL = small_model()
CELL = Cell("tent", {"lr": 1e-3}, corruption="contrast", labels="backward-10", model=MODEL)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with the small model and its adapter; read it, never write to it."""
    folder = tmp_path_factory.mktemp("models")
    shop = Workshop(folder)
    shop.adapter(MODEL)
    return folder


def test_a_key_needs_neither_data_nor_weights(monkeypatch):
    monkeypatch.setattr(module, "load_source", None)
    assert len(CELL.key) == 32
    assert CELL.key == cell_from(json.loads(json.dumps(asdict(CELL)))).key


def test_it_trains_what_is_missing_and_finds_it_again(tmp_path, trained):
    assert len(list(trained.glob("*/card.json"))) == 2
    shop = Workshop(tmp_path / "none yet", also=[trained])
    assert not shop.missing(MODEL, adapter=True)
    result = shop.run(replace(CELL, adapter="trained"))
    assert result.key == replace(CELL, adapter="trained").key
    assert result.source.weights == Workshop(trained).source(MODEL).weights
    assert result.adapter == Workshop(trained).adapter(MODEL).fingerprint()
    assert not list((tmp_path / "none yet").glob("*/card.json"))  # nothing was trained again
    assert shop.missing(replace(MODEL, seed=1), adapter=False)


def test_a_folder_may_have_any_name(tmp_path, trained):
    for i, folder in enumerate(sorted(p.parent for p in trained.glob("*/card.json"))):
        shutil.copytree(folder, tmp_path / f"mine-{i}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "card.json").write_text("{}")  # something else
    assert not Workshop(tmp_path).missing(MODEL, adapter=True)


def test_models_and_images_are_kept_in_memory(trained, monkeypatch):
    shop = Workshop(trained)
    first = shop.run(CELL)
    monkeypatch.setattr(images, "load", None)
    shop.run(replace(CELL, corruption="fog"))  # made of the same clean images
    monkeypatch.setattr(images, "corrupted", None)
    monkeypatch.setattr(module, "load_source", None)
    again = shop.run(CELL)
    assert again.metrics["accuracy"] == first.metrics["accuracy"]


def test_no_more_images_are_kept_than_there_is_room(trained):
    shop = Workshop(trained)
    for severity in range(1, 6):
        shop.run(replace(CELL, severity=severity))
    assert [key[-1] for key in shop.images._corrupted._items] == [2, 3, 4, 5]


def test_memory_does_not_travel(trained):
    shop = Workshop(trained)
    shop.adapter(MODEL)
    shop.images.of(CELL, shop.source(MODEL))
    assert len(pickle.dumps(shop)) < 1000
    assert pickle.loads(pickle.dumps(shop)) == Workshop(trained)
    assert shop._sources  # ours stays


def _train(folder):
    return Workshop(folder).source(MODEL).weights


def test_two_processes_train_a_model_once(tmp_path):
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        first, second = pool.map(_train, [tmp_path, tmp_path])
    assert first == second
    assert len(list(tmp_path.glob("*/card.json"))) == 1


def test_cells_that_cannot_be_run(trained):
    shop = Workshop(trained)
    with pytest.raises(SettingError, match="the model of a cell to run, must be given by recipe"):
        shop.run(Cell("tent"))
    with pytest.raises(SettingError, match="the recipe of a trained adapter"):
        shop.run(replace(CELL, adapter="trained", model=replace(MODEL, adapter=None)))
    with pytest.raises(UnknownName, match="unknown data set"):
        shop.run(replace(CELL, target="imagenet_d"))
