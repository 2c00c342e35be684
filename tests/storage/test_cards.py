"""Cards: what is malformed is refused before anything is made of it."""

import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, NonNegativeInt

from tests.saved import card_in, change, refit
from twoshift import storage
from twoshift.errors import CheckpointError, StorageError
from twoshift.storage import _cards
from twoshift.storage._folders import Saved

KIND = "checked toy"


@storage.card_of(KIND)
class ToyCard(BaseModel):
    epochs: NonNegativeInt
    names: list[str]
    rate: float | None = None


def save(folder, kind="toy", **content):
    parts = {name: {"x": torch.arange(5)} for name in ("one", "two")}
    storage.save_folder(folder, kind, content, parts)


def test_a_card_comes_back(tmp_path):
    save(tmp_path / "m", classes=["a", "é"], lr=0.1)
    found = storage.read_folder(tmp_path / "m", "toy")
    assert isinstance(found, Saved)
    assert found.card["classes"] == ["a", "é"]
    assert (found.card["lr"], found.card["kind"]) == (0.1, "toy")
    assert found.folder == tmp_path / "m"
    assert found.tensors.keys() == found.digests.keys() == {"one", "two"}
    assert storage.read_card(tmp_path / "m", "toy") == found.card
    with pytest.raises(CheckpointError, match="has no file 'three'"):
        found.file("three")


def test_an_edited_card_is_refused(tmp_path):
    save(tmp_path / "m", lr=0.1)
    card = tmp_path / "m" / "card.json"
    card.write_text(card.read_text().replace("0.1", "0.2"))
    with pytest.raises(CheckpointError, match="was edited"):
        storage.read_card(tmp_path / "m", "toy")


DAMAGED = ["", "{", "[]", "null", "3", "{}", '{"checksum": "0"}', "\x00", '{"files": {}}']


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_card_is_refused(tmp_path, text):
    save(tmp_path / "m")
    (tmp_path / "m" / "card.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"damaged|edited"):
        storage.read_card(tmp_path / "m", "toy")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\xff\xfe\x00", "damaged: 'utf-8' codec"),
        (b"[" * 100_000 + b"]" * 100_000, "card.json is damaged"),
        (b'{"a":' * 100_000 + b"0" + b"}" * 100_000, "card.json is damaged"),
        (b"[" * 40 + b"]" * 40, "nested more than 32 deep"),
        (b'{"kind": NaN}', "NaN is no number"),
        (b'{"kind": -Infinity}', "-Infinity is no number"),
        (b'{"kind": 1e999}', "a number is infinite"),
        (b'{"kind": ' + b"9" * 40 + b"}", "more than 64 bits"),
        (b'{"kind": ' + b"9" * 5000 + b"}", "damaged: Exceeds the limit"),
        (b'{"kind": "\\ud800"}', "surrogates not allowed"),
        (b'{"\\udfff": 0}', "surrogates not allowed"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_text_that_no_card_has_is_refused(tmp_path, raw, message):
    save(tmp_path / "m")
    (tmp_path / "m" / "card.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        storage.read_card(tmp_path / "m", "toy")


def test_a_huge_card_is_neither_read_whole_nor_written(tmp_path, monkeypatch):
    save(tmp_path / "m")
    os.truncate(tmp_path / "m" / "card.json", 1 << 40)  # a hole: it takes no space
    with pytest.raises(CheckpointError, match=r"card\.json, must be at most \d+ bytes"):
        storage.read_card(tmp_path / "m", "toy")
    monkeypatch.setattr(_cards, "LARGEST", 100)
    with pytest.raises(StorageError, match="must be at most 100 bytes"):
        save(tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())


def test_no_card_and_another_kind(tmp_path):
    with pytest.raises(CheckpointError, match=r"no toy in .*nowhere"):
        storage.read_card(tmp_path / "nowhere", "toy")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"no toy in .*file"):
        storage.read_card(tmp_path / "file", "toy")
    save(tmp_path / "m")
    with pytest.raises(CheckpointError, match="must be a saved source model, got toy"):
        storage.read_card(tmp_path / "m", "source model")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"epochs": ...},
            "malformed: epochs, must be given, got nothing. Restore it or save again",
        ),
        ({"epochs": -1}, "epochs, must be greater than or equal to 0, got -1"),
        ({"epochs": "3"}, "epochs, must be a valid integer, got '3'"),
        ({"epochs": True}, "epochs, must be a valid integer, got True"),
        ({"epochs": 2.5}, "epochs, must be a valid integer, got 2.5"),
        ({"names": "abc"}, "names, must be a valid array, got 'abc'"),
        ({"names": ["a", 3]}, r"names\.1, must be a valid string, got 3"),
        ({"rate": []}, "rate, must be a valid number"),
        ({"names": ["x" * 500, 3, "y" * 500]}, r"names\.1, must be a valid string"),
        ({"kind": None}, "must be a saved checked toy, got None"),
        ({"kind": [KIND]}, "must be a saved checked toy, got"),
        ({"files": []}, "files, must be an object"),
        ({"files": {"one": 3}}, r"files\.one.*must be an object or a valid string, got 3"),
        ({"files": {"one": {"file": "x"}}}, r"files\.one.*must be given"),
        ({"files": {"one": "sha"}}, r"files\.one"),
        ({"files": {str(i): "0" * 64 for i in range(99)}}, "files, must .*at most 64"),
    ],
    ids=str,
)
def test_a_card_with_wrong_fields_is_refused(tmp_path, fields, message):
    save(tmp_path / "m", KIND, epochs=3, names=["a"])
    assert storage.read_card(tmp_path / "m", KIND)["epochs"] == 3
    change(tmp_path / "m", **fields)
    with pytest.raises(CheckpointError, match=message) as e:
        storage.read_card(tmp_path / "m", KIND)
    assert len(str(e.value)) < 600


def test_what_would_not_load_is_not_saved(tmp_path):
    save(tmp_path / "m", KIND, epochs=3, names=["a"])
    for wrong in ({"epochs": -1, "names": []}, {"epochs": 1, "names": ["a"], "other": 2**70}):
        with pytest.raises(StorageError, match=r"epochs, must be|more than 64 bits"):
            save(tmp_path / "m", KIND, **wrong)
    for value in (float("nan"), {1, 2}, torch.ones(1)):
        with pytest.raises(StorageError, match=r"card\.json: .* must be finite numbers, texts"):
            save(tmp_path / "m", KIND, epochs=1, names=[], other=value)
    assert storage.read_card(tmp_path / "m", KIND)["epochs"] == 3
    assert len(list((tmp_path / "m").iterdir())) == 3


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/hostname", "..", ".", "", "a/b", "a\\b", ".hidden", "x\0", "x" * 300, "é"],
)
@pytest.mark.parametrize("layout", ["today", "0.1.0"])
def test_a_card_names_only_files_beside_it(tmp_path, name, layout):
    save(tmp_path / "m")
    (tmp_path / "secret").write_text("private")
    card = card_in(tmp_path / "m")
    card["files"] = {name: "0" * 64}
    if layout == "today":
        card["files"] = {"one": {"file": name, "sha256": "0" * 64}}
    refit(tmp_path / "m", card)
    with pytest.raises(CheckpointError, match=r"malformed: files"):
        storage.read_card(tmp_path / "m", "toy")
    save(tmp_path / "m")  # and a save over it removes nothing that such a card lists
    assert (tmp_path / "secret").read_text() == "private"


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_any_flipped_byte_of_a_saved_folder_is_noticed(tmp_path_factory, place, flip):
    folder = tmp_path_factory.mktemp("flip") / "m"
    save(folder, lr=0.1)
    files = sorted(folder.iterdir())
    content = b"".join(f.read_bytes() for f in files)
    place %= len(content)
    for file in files:
        size = file.stat().st_size
        if place < size:
            raw = bytearray(file.read_bytes())
            raw[place] ^= flip
            file.write_bytes(raw)
            break
        place -= size
    try:
        card = storage.read_card(folder, "toy")
    except CheckpointError:
        return
    # only white space between the card's values may change unnoticed
    assert file.name == "card.json"
    assert card["lr"] == 0.1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.sampled_from(["kind", "files", "epochs", "names", "x"]), json_values))
def test_any_json_is_read_or_refused(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("any")
    content = {"kind": KIND, "epochs": 1, "names": [], "files": {}, **content}
    text = json.dumps({**content, "checksum": _cards.checksum(content)})
    (folder / "card.json").write_text(text)
    try:
        card = storage.read_card(folder, KIND)
    except CheckpointError:
        return
    assert card["epochs"] >= 0
    assert json.dumps(card)
