"""The method of a cell gets the facts of the source model, the adapter and the estimator."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.bench.test_cell import CLASSES, COUNTS, make_images, make_source
from tests.toys import make_dart
from twoshift.adapters import LabelShiftAdapter, adapted_heads
from twoshift.bench import Cell, run_cell
from twoshift.bench.build import build
from twoshift.calibration import Calibration, calibration_from, calibration_of, save_calibration
from twoshift.data.stream import Stream
from twoshift.errors import SettingError
from twoshift.methods import LabelAware

SHARES = [count / sum(COUNTS) for count in COUNTS]


@pytest.fixture
def stream():
    return Stream(make_images(), np.array([0.1, 0.2, 0.3, 0.4]), batch_size=16)


@pytest.fixture
def source():
    return make_source()


def predictions(seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(CLASSES).repeat(50)
    return 2 * torch.eye(CLASSES)[labels] + torch.randn(200, CLASSES, generator=g), labels


@pytest.fixture
def calibrated(source, tmp_path):
    channels = source.model[1].num_features
    facts = {
        "fisher": {"1.weight": torch.ones(channels), "1.bias": torch.full((channels,), 2.0)},
        "moments": {"1": torch.rand(2, CLASSES, channels, generator=torch.Generator())},
    }
    running, batch = (calibration_from(*predictions(seed)) for seed in (0, 1))
    save_calibration(tmp_path, Calibration(running, batch, True, 2, source.weights, facts))
    return replace(source, folder=tmp_path)


def adapter_of(live):
    (head,) = [head for _, head in adapted_heads(live)]
    return head.adapter


def test_a_method_gets_the_facts_it_names(source, calibrated, stream):
    calibration = calibration_of(calibrated)
    eata = build(Cell("eata"), calibrated, None, stream)
    assert all(torch.equal(v, calibration.facts["fisher"][k]) for k, v in eata.fisher.items())
    matched = build(Cell("matched"), calibrated, None, stream)
    assert torch.equal(matched.moments["1"], calibration.facts["moments"]["1"])
    cotta = build(Cell("cotta"), calibrated, None, stream)
    assert cotta.confidence_threshold == calibration.batch["confidence_threshold"]


@pytest.mark.parametrize(("method", "statistics"), [("source", "running"), ("tent", "batch")])
def test_what_dart_refines_decides_the_statistics_of_the_facts(
    calibrated, stream, method, statistics
):
    known = calibration_of(calibrated)
    dart = make_dart(CLASSES)
    save_calibration(calibrated.folder, replace(known, facts={**known.facts, "dart": dart}))
    cell = Cell("dart", {"method": method}, adapter="identity", estimator="em")
    live = build(cell, calibrated, None, stream)
    assert torch.equal(live.method.dart["out_bias"], dart["out_bias"])
    assert live.estimator.temperature == getattr(known, statistics)["temperature"]
    matched = build(Cell("dart", {"method": "matched"}), calibrated, None, stream)
    assert torch.equal(matched.inner.moments["1"], known.facts["moments"]["1"])


def test_without_a_calibration_it_has_its_defaults_or_says_what_it_needs(source, stream):
    assert build(Cell("cotta"), source, None, stream).confidence_threshold == 0.92
    for method in ("eata", "matched", "dart"):
        with pytest.raises(SettingError, match="twoshift calibrate"):
            build(Cell(method), source, None, stream)
    assert build(Cell("eata", {"fisher_weight": 0}), source, None, stream).fisher is None


def test_a_cell_has_the_last_word(calibrated, stream):
    cell = Cell("cotta", {"confidence_threshold": 0.5})
    assert build(cell, calibrated, None, stream).confidence_threshold == 0.5
    chosen = {"temperature": 3.0, "window": 9}
    cell = Cell("tent", adapter="identity", estimator="em", estimator_settings=chosen)
    estimator = build(cell, calibrated, None, stream).estimator
    assert (estimator.temperature, estimator.window) == (3.0, 9)
    assert torch.equal(estimator.bias, calibration_of(calibrated).batch["bias"])
    assert (chosen, cell.estimator_settings) == ({"temperature": 3.0, "window": 9}, chosen)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("em", {"temperature", "bias"}),
        ("tilt", {"temperature", "bias"}),
        ("bbse", {"confusion", "hard_confusion"}),
        ("rlls", {"confusion", "hard_confusion", "samples"}),
        ("readout", {"regression"}),
    ],
)
@pytest.mark.parametrize(("method", "mode"), [("tent", "batch"), ("source", "running")])
def test_estimators_are_calibrated_for_the_methods_statistics(
    calibrated, stream, name, facts, method, mode
):
    live = build(Cell(method, adapter="identity", estimator=name), calibrated, None, stream)
    expected, settings = calibration_of(calibrated).of(mode), live.estimator.settings()
    for fact in facts:
        assert np.array_equal(settings[fact], expected[fact]), fact
    if name == "tilt":
        assert settings["source_prior"] == pytest.approx(SHARES)


def test_every_estimator_of_a_calibrated_model_runs(calibrated):
    for name in ("em", "mapls", "fmapls", "online_fmapls", "tilt", "bbse", "rlls", "readout"):
        cell = Cell("tent", adapter="logit", estimator=name, labels="backward-10", batch_size=16)
        assert 0 < run_cell(cell, calibrated, images=make_images()).metrics["accuracy"] < 1


@pytest.mark.parametrize(("method", "mode"), [("tent", "batch"), ("source", "running")])
def test_a_calibrated_adapter_has_the_temperature_of_the_methods_statistics(
    calibrated, stream, method, mode
):
    cell = Cell(method, adapter="calibrated", estimator="oracle", labels="backward-10")
    adapter = adapter_of(build(cell, calibrated, None, stream))
    assert adapter.temperature == calibration_of(calibrated).of(mode)["temperature"] != 1
    ours, plain = (
        run_cell(c, calibrated, images=make_images())
        for c in (cell, replace(cell, adapter="logit"))
    )
    assert ours.key != plain.key
    assert ours.metrics["nll"] != plain.metrics["nll"]


@pytest.mark.parametrize("name", ["identity", "logit"])
@pytest.mark.parametrize("strategy", ["balanced_softmax", "cross_entropy"])
def test_an_untrained_adapter_knows_the_labels_of_the_training(stream, name, strategy):
    live = build(Cell("source", adapter=name), make_source(strategy), None, stream)
    adapter = adapter_of(live)
    assert adapter.class_counts == COUNTS
    if name == "logit":
        assert adapter.assumes == (pytest.approx(SHARES) if strategy == "cross_entropy" else None)


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        (Cell("source", adapter="calibrated", estimator="oracle"), "temperature"),
        (Cell("source", adapter="identity", estimator="em"), "temperature"),
        (Cell("source", adapter="identity", estimator="tilt"), "temperature"),
        (Cell("source", adapter="identity", estimator="bbse"), "confusion"),
        (Cell("source", adapter="identity", estimator="readout"), "regression"),
    ],
)
def test_what_needs_a_calibration_names_the_cure(source, stream, cell, name):
    with pytest.raises(SettingError, match=rf"'{name}' .*twoshift calibrate --source DIR"):
        build(cell, source, None, stream)


def test_an_oracle_is_told_the_stream(source, stream):
    live = build(Cell("source", adapter="logit", estimator="oracle"), source, None, stream)
    assert np.allclose(live.prior, stream.prior)
    chosen = {"prior": [0.25] * CLASSES}
    cell = Cell("source", adapter="logit", estimator="oracle", estimator_settings=chosen)
    assert live.estimator.is_oracle
    assert build(cell, source, None, stream).prior.tolist() == chosen["prior"]


def test_only_a_cell_with_an_adapter_has_an_estimator(source, stream):
    assert not isinstance(build(Cell("tent"), source, None, stream), LabelAware)
    assert isinstance(build(Cell("tent", adapter="identity"), source, None, stream), LabelAware)


def test_a_trained_adapter_must_be_given_and_a_fresh_one_is_none(source, stream):
    with pytest.raises(SettingError, match="given that adapter"):
        build(Cell("tent", adapter="trained"), source, None, stream)
    given = LabelShiftAdapter(8, CLASSES)
    live = build(Cell("tent", adapter="trained"), source, given, stream)
    assert adapter_of(live).fingerprint() == given.fingerprint()
    for name in ("label_shift", "classwise"):
        with pytest.raises(SettingError, match=f"adapter '{name}' .* needs no training.*'trained'"):
            build(Cell("tent", adapter=name), source, None, stream)
