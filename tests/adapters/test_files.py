"""Adapters on disk: saved and loaded, damaged, and those that 0.1.0 wrote."""

import json
from pathlib import Path

import pytest
import torch

from tests.adapters import cases
from tests.adapters.slow import PRIOR, C, D
from tests.saved import as_first_version, card_in, change, refit
from tests.toys import make_net, randomise, same
from twoshift.adapters import (
    ClasswiseAdapter,
    HeadShift,
    LabelShiftAdapter,
    load_adapter,
    save_adapter,
    shifted_logits,
)
from twoshift.adapters.label_shift import FORMS
from twoshift.errors import CheckpointError
from twoshift.storage import saved_files

ROOT = Path(__file__).resolve().parents[2]
ROUND_TRIPS = [{"dw": dw} for dw in FORMS] + [
    {"class_counts": [3, 40, 10, 7], "lambdas": (1, -1.5, -3), "hidden": 9},
    {"gamma": False, "db": False, "condition": "full"},
]


def logits(shift: HeadShift, features: int = D, classes: int = C):
    g = torch.Generator().manual_seed(0)
    h, weight = torch.randn(3, features, generator=g), torch.randn(classes, features, generator=g)
    with torch.no_grad():
        return shifted_logits(h, weight, torch.randn(classes, generator=g), shift)


@pytest.mark.parametrize("settings", ROUND_TRIPS, ids=str)
def test_saved_and_loaded(settings, tmp_path):
    adapter = randomise(LabelShiftAdapter(D, C, **settings))
    save_adapter(tmp_path / "a", adapter, {"source": "a toy"})
    loaded = load_adapter(tmp_path / "a")
    assert loaded.settings() == adapter.settings()
    assert same(dict(loaded.state_dict()), dict(adapter.state_dict()))
    assert not loaded.training
    assert torch.equal(logits(loaded(PRIOR)), logits(adapter(PRIOR)))


@pytest.mark.parametrize("name", cases.NAMES)
def test_every_kind_is_saved_with_its_name(name, tmp_path):
    net = make_net("mlp")
    adapter = cases.make(name, net)
    save_adapter(tmp_path / "a", adapter)
    card = json.loads((tmp_path / "a" / "card.json").read_text())
    assert card["name"] == name
    loaded = load_adapter(tmp_path / "a")
    assert type(loaded) is type(adapter)
    assert loaded.settings() == adapter.settings()
    assert loaded.fingerprint() == adapter.fingerprint()
    prior, size = torch.tensor(cases.SHARES).flip(0), (adapter.features, adapter.classes)
    assert torch.equal(logits(loaded(prior), *size), logits(adapter(prior), *size))


def test_a_trained_adapter_knows_its_source_model(tmp_path):
    adapter = randomise(LabelShiftAdapter(D, C))
    save_adapter(tmp_path / "a", adapter)
    assert load_adapter(tmp_path / "a").trained_for is None
    save_adapter(tmp_path / "b", adapter, {"training": {"source": "0123"}})
    assert load_adapter(tmp_path / "b").trained_for == "0123"


@pytest.mark.parametrize("file", ["adapter", "card"])
@pytest.mark.parametrize("harm", ["edit", "truncate", "remove", "extend"])
def test_a_damaged_adapter_is_refused(file, harm, tmp_path):
    save_adapter(tmp_path / "a", randomise(LabelShiftAdapter(D, C)))
    path = {**saved_files(tmp_path / "a"), "card": tmp_path / "a" / "card.json"}[file]
    content = path.read_bytes()
    middle = len(content) // 2
    if harm == "remove":
        path.unlink()
    else:
        flipped = bytes([content[middle] ^ 1])
        path.write_bytes(
            {
                "edit": content[:middle] + flipped + content[middle + 1 :],
                "truncate": content[:middle],
                "extend": content + b"x",
            }[harm]
        )
    with pytest.raises(CheckpointError):
        load_adapter(tmp_path / "a")


def test_a_changed_setting_is_refused(tmp_path):
    save_adapter(tmp_path / "a", randomise(LabelShiftAdapter(D, C)))
    card = tmp_path / "a" / "card.json"
    text = card.read_text()
    assert '"dw": "class"' in text
    card.write_text(text.replace('"dw": "class"', '"dw": "none"'))
    with pytest.raises(CheckpointError, match="was edited"):
        load_adapter(tmp_path / "a")


@pytest.mark.parametrize(
    "card",
    [
        {"name": "label_shift", "settings": {"features": D, "classes": C, "hidden": 3}},
        {"name": "nobody", "settings": {"features": D, "classes": C}},
        {"name": "label_shift", "settings": {"features": D, "classes": C, "depth": 3}},
        {"name": "label_shift"},
    ],
    ids=["other weights", "unknown name", "unknown setting", "no settings"],
)
def test_a_card_that_does_not_fit_is_refused(card, tmp_path):
    write_by_hand(tmp_path / "a", randomise(LabelShiftAdapter(D, C)), card)
    with pytest.raises(CheckpointError, match=r"does not fit its own card|settings, must be given"):
        load_adapter(tmp_path / "a")


@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("size", [10**6, 10**9, 10**18])
@pytest.mark.parametrize("setting", ["classes", "features", "hidden"])
def test_sizes_that_the_weights_do_not_have_are_never_built(name, size, setting, tmp_path):
    adapter = cases.make(name, make_net("mlp"))
    save_adapter(tmp_path / "a", adapter)
    card = card_in(tmp_path / "a")
    card["settings"] = {**card["settings"], "class_counts": None, setting: size}
    refit(tmp_path / "a", card)
    if setting == "features" and name != "label_shift":
        return  # none of the weights depends on it, and a head of another size is refused
    with pytest.raises(CheckpointError, match="does not fit its own card"):
        load_adapter(tmp_path / "a")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": 3}, "name, must be a valid string"),
        ({"settings": [1]}, "settings, must be an object"),
        ({"settings": {"features": 4}}, r"settings\.classes, must be given"),
        ({"settings": {"features": 0, "classes": 4}}, r"settings\.features, must be greater"),
        ({"training": "long"}, "training, must be an object"),
        ({"training": {"source": 5}}, r"training\.source, must be a valid string"),
    ],
    ids=str,
)
def test_a_malformed_card_is_refused(fields, message, tmp_path):
    save_adapter(tmp_path / "a", randomise(LabelShiftAdapter(D, C)))
    change(tmp_path / "a", **fields)
    with pytest.raises(CheckpointError, match=message):
        load_adapter(tmp_path / "a")


def write_by_hand(folder, adapter, card, first_version=False):
    save_adapter(folder, adapter)
    kept = {name: card_in(folder)[name] for name in ("kind", "files")}
    refit(folder, {**kept, **card})
    if first_version:
        as_first_version(folder)


OLD = {  # as 0.1.0 wrote them: no name, and every setting of its one class
    "features": D,
    "classes": C,
    "class_counts": [8.0, 4.0, 2.0, 1.0],
    "dw": "class",
    "gamma": True,
    "beta": True,
    "db": True,
    "condition": "scalar",
    "hidden": 5,
    "lambdas": [1.0, 0.0, -2.0],
}
SIZE = {"class_counts": OLD["class_counts"], "hidden": 5}
SHARES = [0.4, 0.3, 0.2, 0.1]


@pytest.mark.parametrize(
    ("changes", "kind", "settings"),
    [
        ({}, LabelShiftAdapter, {}),
        ({"condition": "full", "dw": "rank1"}, LabelShiftAdapter, None),
        ({"gamma": False, "db": False}, LabelShiftAdapter, None),
        ({"condition": "classwise", "gamma": False, "beta": False}, ClasswiseAdapter, {}),
        (
            {"condition": "classwise", "gamma": False, "beta": False, "assumes": SHARES},
            ClasswiseAdapter,
            {"assumes": SHARES},
        ),
        (
            {"condition": "classwise", "gamma": False, "beta": False, "dw": "none"},
            ClasswiseAdapter,
            {"dw": "none"},
        ),
    ],
    ids=str,
)
def test_an_adapter_of_the_first_version(changes, kind, settings, tmp_path):
    expected = randomise(kind(D, C, **{**SIZE, **(changes if settings is None else settings)}))
    write_by_hand(tmp_path / "a", expected, {"settings": {**OLD, **changes}}, True)
    loaded = load_adapter(tmp_path / "a")
    assert type(loaded) is kind
    assert loaded.settings() == expected.settings()
    assert torch.equal(logits(loaded(PRIOR)), logits(expected(PRIOR)))


def test_a_temperature_of_the_first_version_is_refused_with_a_cure(tmp_path):
    settings = {**OLD, "condition": "classwise", "dw": "none", "temperature": 1.5}
    write_by_hand(tmp_path / "a", LabelShiftAdapter(D, C), {"settings": settings}, True)
    with pytest.raises(CheckpointError, match=r"temperature cannot be read.*logit_adapter\("):
        load_adapter(tmp_path / "a")


FOLDERS = sorted((ROOT / "checkpoints").glob("*-adapter*"))


def test_the_repository_has_adapters_of_both_trained_kinds():
    kinds = {type(load_adapter(folder)) for folder in FOLDERS}
    assert kinds == {LabelShiftAdapter, ClasswiseAdapter}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_adapters_of_the_repository_are_those_of_its_records(folder):
    adapter = load_adapter(folder)
    card = json.loads((folder / "card.json").read_text())
    assert adapter.trained_for == card["training"]["source"]
    assert adapter.classes == len(adapter.class_counts) == 10
    for name in adapter.settings().keys() & card["settings"].keys():
        assert adapter.settings()[name] == card["settings"][name]
    records = (ROOT / "results").glob("*.jsonl")
    assert any(f'"adapter":"{adapter.fingerprint()}"' in path.read_text() for path in records)
