"""Keys of cells: what is in them, and that later versions find the records of earlier ones."""

import inspect
import json
from dataclasses import asdict, dataclass, replace

import pytest

from tests.bench.test_workshop import CELL, MODEL, small_model
from tests.documents import ROOT
from twoshift import estimators, methods
from twoshift.bench import keys
from twoshift.bench.cell import Cell, Model, cell_from, digest
from twoshift.bench.result import Result
from twoshift.calibration.facts import fact_names
from twoshift.registry import signature_settings
from twoshift.train.recipes import AdapterRecipe, SourceRecipe

LINES = sorted((ROOT / "results").glob("*.jsonl"))


ADAPTED = replace(CELL, adapter="trained")


@pytest.fixture
def records() -> list[Result]:
    lines = [line for path in LINES for line in path.read_text().splitlines()]
    return [Result.from_json(json.loads(line)) for line in lines]


# -- what is in a key -------------------------------------------------------------------------


def test_a_key_is_that_of_its_record():
    assert CELL.key == cell_from(json.loads(json.dumps(asdict(CELL)))).key


def test_digests_are_the_same_everywhere():
    assert digest({"b": [1, None], "a": 0.1}) == "99c2505ae8eb72b771949758f938c727"


def test_keys_stay_what_they_are():
    """Others have records under these keys: if this fails, they are measured again for nothing."""
    assert Cell("tent").key == "5b8e81b2e69da2ab4e45082a8a03c716"
    assert CELL.key == "9d1df329616e589e4cff924f83e9eaf7"
    assert replace(ADAPTED, estimator="em").key == "4dd61a3fd3b2be4b49b8e49b1c47e4b8"


def test_defaults_and_named_defaults_are_the_same_cell():
    named = replace(CELL, settings={"lr": 1e-3, "optim": "adam", "freeze": []})
    assert replace(CELL, settings={}).key == named.key == CELL.key


@pytest.mark.parametrize(
    "change",
    [
        {"method": "bn_stats", "settings": {}},
        {"settings": {"lr": 2e-3}},
        {"adapter": "identity"},
        {"adapter": "trained"},
        {"corruption": "fog"},
        {"severity": 4},
        {"labels": "backward-50"},
        {"seed": 1},
        {"batch_size": 32},
        {"order": "correlated"},
        {"target": "mnist5k"},
        {"model": replace(MODEL, seed=1)},
        {"model": small_model(epochs=2)},
    ],
)
def test_everything_that_decides_a_number_is_in_its_key(change):
    assert replace(CELL, **change).key != CELL.key


def test_the_protocol_is_in_the_key(monkeypatch):
    before = CELL.key
    monkeypatch.setattr("twoshift.bench.cell.PROTOCOL", 2)
    assert CELL.key != before


def test_what_is_not_used_is_not_in_the_key():
    other = replace(MODEL, adapter={**MODEL.adapter, "epochs": 7})
    assert replace(CELL, model=other).key == CELL.key
    assert replace(CELL, estimator="em").key == CELL.key  # without an adapter nobody asks it
    assert replace(ADAPTED, model=other).key != ADAPTED.key
    assert replace(ADAPTED, estimator="em").key != ADAPTED.key
    assert replace(ADAPTED, estimator_settings={"alpha": 0.1}).key == ADAPTED.key
    assert replace(ADAPTED, estimator_settings={"alpha": 0.2}).key != ADAPTED.key


def test_facts_of_the_source_model_are_in_a_key_only_where_the_cell_gives_them(monkeypatch):
    em = replace(ADAPTED, estimator="em")
    before = em.key
    with_fact = replace(em, estimator_settings={"temperature": 1.0})  # the default is given
    assert with_fact.key != before
    eata = Cell("eata")
    assert replace(eata, settings={"fisher": None}).key != eata.key
    monkeypatch.setattr("twoshift.bench.keys.fact_names", lambda: {*fact_names(), "alpha"})
    assert em.key == before


def test_only_existing_settings_are_listed_and_no_fact():
    for registry, kind in ((methods.methods, "methods"), (estimators.estimators, "estimators")):
        for name, settings in keys.listed()[kind].items():
            assert set(settings) <= set(signature_settings(registry[name])) - fact_names(), name


# -- later versions ---------------------------------------------------------------------------


@dataclass(frozen=True)
class LaterCell(Cell):
    colour: str = "grey"
    weather: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaterModel(Model):
    ensemble: int = 1


class LaterSourceRecipe(SourceRecipe):
    warmup: int = 5


class LaterAdapterRecipe(AdapterRecipe):
    warmup: int = 5


def later_entry(entry):
    """A method or estimator with one more setting."""
    signature = inspect.signature(entry)
    more = inspect.Parameter("patience", inspect.Parameter.KEYWORD_ONLY, default=(3, 4))

    def later(*arguments, **settings):
        raise AssertionError("only its signature is read")

    later.__signature__ = signature.replace(parameters=[*signature.parameters.values(), more])
    return later


@pytest.fixture
def later(monkeypatch):
    """A later version: every kind of setting has got one more, with a default."""
    monkeypatch.setattr(keys, "SourceRecipe", LaterSourceRecipe)
    monkeypatch.setattr(keys, "AdapterRecipe", LaterAdapterRecipe)
    for registry in (methods.methods, estimators.estimators):
        entries = {name: later_entry(registry[name]) for name in registry}
        monkeypatch.setattr(registry, "_entries", entries)

    def as_later(cell: Cell, **changes: object) -> LaterCell:
        model = cell.model
        if model is not None:
            source = LaterSourceRecipe.model_validate(model.source).model_dump()
            adapter = model.adapter
            if adapter is not None:
                adapter = LaterAdapterRecipe.model_validate(adapter).model_dump()
            model = LaterModel(source, adapter, model.seed)
        return LaterCell(**{**vars(cell), "model": model, **changes})

    return as_later


def test_there_are_records():
    assert len(LINES) > 7


def test_every_record_has_the_key_of_its_cell(records):
    assert [r.key for r in records] == [r.cell.key for r in records]


def test_a_later_version_finds_every_record(records, later):
    assert [later(r.cell).key for r in records] == [r.key for r in records]


def test_models_keep_their_names_too(later):
    model = later(ADAPTED).model
    assert (model.source_key, model.adapter_key) == (MODEL.source_key, MODEL.adapter_key)


def test_in_a_later_version_a_new_setting_matters_once_it_is_used(later):
    cell = later(ADAPTED)
    assert cell.key == ADAPTED.key
    assert replace(cell, settings={"patience": [3, 4]}).key == cell.key
    changed = [
        replace(cell, colour="red"),
        replace(cell, weather=("fog",)),
        replace(cell, settings={"patience": [5]}),
        replace(cell, estimator_settings={"patience": [5]}),
        replace(cell, model=replace(cell.model, ensemble=2)),
        replace(cell, model=replace(cell.model, source={**cell.model.source, "warmup": 6})),
        replace(cell, model=replace(cell.model, adapter={**cell.model.adapter, "warmup": 6})),
    ]
    assert len({c.key for c in (cell, *changed)}) == len(changed) + 1


def test_another_default_of_an_old_setting_makes_another_key(monkeypatch):
    before = CELL.key, replace(CELL, settings={}).key
    signature = inspect.signature(methods.methods["tent"])
    parameters = [
        p.replace(default="sgd") if p.name == "optim" else p for p in signature.parameters.values()
    ]
    entry = later_entry(methods.methods["tent"])
    entry.__signature__ = signature.replace(parameters=parameters)
    entries = {**methods.methods._entries, "tent": entry}
    monkeypatch.setattr(methods.methods, "_entries", entries)
    assert CELL.key not in before
    assert replace(CELL, settings={"optim": "adam"}).key in before


def test_a_new_method_has_all_its_settings_in_the_key(monkeypatch):
    entries = {**methods.methods._entries, "mine": later_entry(methods.methods["tent"])}
    monkeypatch.setattr(methods.methods, "_entries", entries)
    before = Cell("mine").key
    signature = inspect.signature(entries["mine"])
    patience = signature.parameters["patience"].replace(default=(9,))
    again = later_entry(methods.methods["tent"])
    again.__signature__ = signature.replace(
        parameters=[p for p in signature.parameters.values() if p.name != "patience"] + [patience]
    )
    monkeypatch.setattr(methods.methods, "_entries", {**entries, "mine": again})
    assert Cell("mine").key != before
