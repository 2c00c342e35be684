"""Calibrations on disk: any fact comes back, and nothing that is damaged or foreign does."""

import json
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.calibration.conftest import FOLDS
from tests.calibration.same import same
from tests.saved import change
from tests.saved import names as names_in
from twoshift import storage
from twoshift.calibration import (
    Calibration,
    calibration_of,
    crossfit,
    known_facts,
    load_calibration,
    save_calibration,
)
from twoshift.calibration.base import FOLDER, MODES, TENSORS
from twoshift.calibration.facts import FROM_CARD, FROM_IMAGES, FROM_PREDICTIONS, FROM_SHIFTS
from twoshift.errors import CheckpointError, MismatchError, SettingError
from twoshift.storage import CARD
from twoshift.train.checkpoint import load_source, save_source

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
WEIGHTS = "0123456789abcdef" * 4


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def made_of(**facts):
    return Calibration(facts, facts, held_out=True, folds=2, source=WEIGHTS, facts=facts)


@st.composite
def tensors(draw):
    dtype = draw(
        st.sampled_from(
            [
                torch.float64,
                torch.float32,
                torch.float16,
                torch.bfloat16,
                torch.int64,
                torch.uint8,
                torch.bool,
            ]
        )
    )
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = torch.rand(shape, generator=g).mul(9).to(dtype)
    return values.transpose(0, -1) if shape and draw(st.booleans()) else values


whole = st.integers(1 - 2**64, 2**64 - 1)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True)
numbers = st.floats(allow_nan=False, allow_infinity=False) | whole | st.booleans()
values = st.none() | numbers | tensors() | st.dictionaries(st.text("ab.é_0", max_size=9), tensors())
facts_by_name = st.dictionaries(names, values, max_size=4)


@settings(max_examples=60)
@given(facts_by_name, facts_by_name, facts_by_name, st.booleans(), st.integers(0, 9))
def test_any_fact_comes_back_as_it_was(running, batch, facts, held_out, folds):
    calibration = Calibration(running, batch, held_out, folds, WEIGHTS, facts)
    with tempfile.TemporaryDirectory() as folder:
        save_calibration(folder, calibration)
        assert same(load_calibration(folder, WEIGHTS), calibration)
        save_calibration(folder, made_of(other=1))  # replaces all of it
        assert same(load_calibration(folder, WEIGHTS), made_of(other=1))


def test_facts_with_the_names_of_groups_and_of_0_1_0_stay_apart(tmp_path):
    odd = {"running": torch.zeros(1), "batch": {"facts": torch.ones(2)}, "soft": 1, "readout": 2.5}
    save_calibration(tmp_path, made_of(**odd, facts=None))
    assert same(load_calibration(tmp_path, WEIGHTS), made_of(**odd, facts=None))


def test_it_is_kept_with_the_source_model(source_folder, calibrated_folder):
    assert calibration_of(load_source(source_folder)) is None
    source = load_source(calibrated_folder)
    calibration = calibration_of(source)
    assert (calibration.folds, calibration.held_out) == (FOLDS, True)
    assert calibration.source == source.weights
    card = json.loads((calibrated_folder / FOLDER / CARD).read_text())
    assert card["kind"] == "calibration"
    assert card["batch"]["temperature"] == calibration.batch["temperature"]
    assert str(calibrated_folder.parent) not in json.dumps(card)  # nothing of this machine
    weights = storage.saved_files(calibrated_folder)["model"].name
    assert names_in(calibrated_folder) == ["calibration", "card.json", weights]


def test_facts_are_those_of_card_and_calibration(source_folder, calibrated_folder):
    source, calibrated = load_source(source_folder), load_source(calibrated_folder)
    on_card = {name: read(source.card) for name, read in FROM_CARD.items()}
    assert known_facts(source, "batch") == on_card
    assert known_facts(replace(calibrated, folder=None), "batch") == on_card  # in memory only
    calibration = calibration_of(calibrated)
    for mode in MODES:
        facts = known_facts(calibrated, mode)
        assert facts.keys() == {*FROM_CARD, *FROM_PREDICTIONS, *FROM_IMAGES, *FROM_SHIFTS}
        assert same(facts, {**on_card, **getattr(calibration, mode), **calibration.facts})
    assert calibration.running["temperature"] != calibration.batch["temperature"]
    with pytest.raises(SettingError, match="must be running or batch, got 'both'"):
        calibration.of("both")


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(bytes(content))


def edit(path):
    path.write_text(path.read_text().replace('"held_out": true', '"held_out": 1234', 1))


@pytest.mark.parametrize("loaded_before", [False, True])
@pytest.mark.parametrize(
    ("damage", "name", "message"),
    [
        (cut, TENSORS, r"calibration-\w{12}\.safetensors is truncated or edited"),
        (flip_a_bit, TENSORS, r"calibration-\w{12}\.safetensors is truncated or edited"),
        (Path.unlink, TENSORS, r"calibration-\w{12}\.safetensors is missing"),
        (cut, CARD, r"card\.json is damaged"),
        (edit, CARD, r"card\.json was edited"),
        (Path.unlink, CARD, "no calibration in"),
    ],
)
def test_a_damaged_calibration_is_refused(calibrated, damage, name, message, loaded_before):
    if loaded_before:
        assert calibration_of(calibrated) is not None
    folder = calibrated.folder / FOLDER
    damage({**storage.saved_files(folder), CARD: folder / CARD}[name])
    with pytest.raises(CheckpointError, match=message):
        calibration_of(calibrated)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"running": ...}, "running, must be given, got nothing"),
        ({"folds": ...}, "folds, must be given, got nothing"),
        ({"folds": -1}, "folds, must be greater than or equal to 0, got -1"),
        ({"batch": 5}, "batch, must be an object, got 5"),
        ({"batch": {"temperature": "hot"}}, r"batch\.temperature"),
        ({"facts": {"fisher": 0.5}}, r"does not fit its own card.*calibrate again"),
    ],
)
def test_a_card_that_does_not_fit_its_tensors_is_refused(calibrated, fields, message):
    change(calibrated.folder / FOLDER, **fields)  # valid checksums, wrong content
    with pytest.raises(CheckpointError, match=message):
        calibration_of(calibrated)


def test_the_calibration_of_other_weights_is_refused(calibrated):
    with torch.no_grad():
        calibrated.model.fc.bias.add_(1)
    save_source(calibrated.folder, calibrated.model, calibrated.card)
    other = load_source(calibrated.folder)
    message = f"must be for the weights {other.weights[:12]}, got one for {calibrated.weights[:12]}"
    with pytest.raises(MismatchError, match=rf"{message}. Remove that folder"):
        calibration_of(other)
    shutil.rmtree(calibrated.folder / FOLDER)
    assert calibration_of(other) is None


def test_a_replaced_calibration_is_noticed(tmp_path):
    for temperature in (1.5, 2.5, 3.5):
        save_calibration(tmp_path, made_of(temperature=temperature, bias=torch.ones(2)))
        assert load_calibration(tmp_path, WEIGHTS).of("batch")["temperature"] == temperature
    shutil.rmtree(tmp_path / FOLDER)
    assert load_calibration(tmp_path, WEIGHTS) is None


def test_a_relative_folder_is_that_of_today(tmp_path, monkeypatch):
    for name in ("one", "two"):
        save_calibration(tmp_path / name / "model", made_of(name=len(name)))
        monkeypatch.chdir(tmp_path / name)
        assert same(load_calibration("model", WEIGHTS), made_of(name=3))
        shutil.rmtree("model")
        assert load_calibration("model", WEIGHTS) is None


def test_what_a_killed_writer_left_is_found(tmp_path):
    save_calibration(tmp_path, made_of(temperature=2.0))
    (tmp_path / FOLDER).rename(tmp_path / f".{FOLDER}.old")  # killed between two renames
    assert same(load_calibration(tmp_path, WEIGHTS), made_of(temperature=2.0))


def test_what_a_caller_writes_into_is_his_own(calibrated):
    first, second = calibration_of(calibrated), calibration_of(calibrated)
    expected = calibration_of(calibrated)
    for value in first.facts.values():
        for tensor in value.values() if isinstance(value, dict) else [value]:
            tensor.zero_()
    first.facts["moments"].clear()
    first.running["confusion"].zero_()
    first.batch["temperature"] = 0
    first.of("running").clear()
    assert same(second, expected)
    assert same(calibration_of(calibrated), expected)


def test_many_classes_are_quick_to_load_and_not_in_the_card(tmp_path):
    classes = 1000
    both = {
        "temperature": 1.5,
        "bias": torch.rand(classes).double(),
        "confusion": torch.rand(classes, classes),
        "regression": torch.rand(1 + 2 * classes, classes),
    }
    moments = {f"layer.{i}": torch.rand(2, classes, 100) for i in range(50)}
    calibration = Calibration(both, both, True, 5, WEIGHTS, {"moments": moments})
    save_calibration(tmp_path, calibration)
    assert (tmp_path / FOLDER / CARD).stat().st_size < 1000
    start = time.process_time()
    loaded = load_calibration(tmp_path, WEIGHTS)
    assert time.process_time() - start < 0.7
    assert same(loaded, calibration)


@pytest.fixture(params=["cifar10-iabn"])
def shipped(request, tmp_path):
    """A source model that was calibrated by version 0.1.0, unless another one is named."""
    return load_source(shutil.copytree(CHECKPOINTS / request.param, tmp_path / request.param))


def test_a_calibration_of_0_1_0_is_read_as_it_is(shipped):
    before = files(shipped.folder)
    card = json.loads((shipped.folder / FOLDER / CARD).read_text())
    tensors = load_file(shipped.folder / FOLDER / "calibration.safetensors")
    assert "running.soft" in tensors
    calibration = calibration_of(shipped)
    assert (calibration.folds, calibration.held_out) == (2, True)
    for mode in MODES:
        facts = getattr(calibration, mode)
        assert facts.keys() == {*FROM_PREDICTIONS, "low_confidence"}
        for name in ("temperature", "accuracy", "balanced_accuracy", "samples", "low_confidence"):
            assert facts[name] == card[mode][name]
        assert facts["confidence_threshold"] == card[mode]["cotta_threshold"]
        assert facts["bias"].dtype == torch.float64
        assert facts["bias"].tolist() == card[mode]["bias"]
        assert same(facts["confusion"], tensors[f"{mode}.soft"])
        assert same(facts["hard_confusion"], tensors[f"{mode}.hard"])
        assert same(facts["regression"], tensors[f"{mode}.readout"])
    expected = {}
    for key, tensor in tensors.items():
        name, _, part = key.partition(".")
        if name not in MODES:
            expected.setdefault(name, {})[part] = tensor
    assert same(calibration.facts, expected)
    assert calibration.facts.keys() == {"fisher"}
    assert files(shipped.folder) == before


def test_written_anew_it_is_the_same(shipped):
    calibration = calibration_of(shipped)
    save_calibration(shipped.folder, calibration)
    assert same(calibration_of(shipped), calibration)
    assert "running.confusion" in load_file(storage.saved_files(shipped.folder / FOLDER)[TENSORS])
    assert len(names_in(shipped.folder / FOLDER)) == 2  # nothing of 0.1.0 is left


@pytest.mark.parametrize("shipped", ["cifar10-bn"], indirect=True)
def test_a_complete_one_needs_neither_images_nor_writing(shipped, tmp_path):
    before = files(shipped.folder)
    calibration = crossfit(shipped, folds=2, data=tmp_path / "nowhere")
    assert same(calibration, calibration_of(shipped))
    assert files(shipped.folder) == before
