"""What the source model's card and calibration tell methods and estimators."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from twoshift.bench.facts import estimator_facts, has_estimator, method_facts
from twoshift.train.calibration import Calibration, calibration_from

from tests.bench.test_cell import CLASSES, make_images, make_source
from twoshift.adapters import adapted_heads
from twoshift.bench import Cell, run_cell
from twoshift.bench.cell import build
from twoshift.data.stream import Stream
from twoshift.errors import SettingError


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
def calibrated(source):
    norm = source.model[1]
    calibration = Calibration(
        running=calibration_from(*predictions(0)),
        batch=calibration_from(*predictions(1)),
        held_out=True,
        folds=2,
        source=source.weights,
        fisher={"1.weight": [1.0] * norm.num_features, "1.bias": [2.0] * norm.num_features},
    )
    return replace(source, calibration=calibration)


def test_only_what_a_method_asks_for(source, calibrated):
    assert method_facts("tent", calibrated) == {}
    assert method_facts("pseudo_label", calibrated) == {}  # its threshold is another one
    expected = {"source_prior": source.card.prior.tolist(), "strategy": "balanced_softmax"}
    assert method_facts("logit_adjust", source) == expected
    assert method_facts("cotta", source) == {}
    threshold = calibrated.calibration.batch.cotta_threshold
    assert method_facts("cotta", calibrated) == {"threshold": threshold}
    assert method_facts("eata", calibrated) == {"fisher": calibrated.calibration.fisher}
    assert method_facts("matched", calibrated) == {}  # the calibration is older than it
    newer = replace(calibrated.calibration, moments={"1": [[[0.0]], [[1.0]]]})
    told = method_facts("matched", replace(calibrated, calibration=newer))
    assert told == {"moments": newer.moments}


def test_a_cell_has_the_last_word(calibrated, stream):
    assert build(Cell("cotta", {"threshold": 0.5}), calibrated, None, stream).threshold == 0.5
    told = build(Cell("cotta"), calibrated, None, stream).threshold
    assert told == calibrated.calibration.batch.cotta_threshold


def test_fisher_information_reaches_eata(calibrated, stream):
    assert build(Cell("eata"), calibrated, None, stream).fisher == calibrated.calibration.fisher


@pytest.mark.parametrize("name", ["em", "bbse", "rlls"])
@pytest.mark.parametrize(("method", "mode"), [("tent", "batch"), ("source", "running")])
def test_estimators_are_calibrated_for_the_methods_statistics(
    calibrated, stream, name, method, mode
):
    live = build(Cell(method, adapter="identity", estimator=name), calibrated, None, stream)
    expected = calibrated.calibration.of(mode).settings(name)
    assert expected
    settings = live.estimator.settings()
    for key, value in expected.items():
        assert np.allclose(settings[key], value), key


@pytest.mark.parametrize(("method", "mode"), [("tent", "batch"), ("source", "running")])
def test_a_calibrated_adapter_has_the_temperature_of_the_methods_statistics(
    calibrated, stream, method, mode
):
    live = build(Cell(method, adapter="calibrated", estimator="oracle"), calibrated, None, stream)
    (adapter,) = [head.adapter for _, head in adapted_heads(live.method)]
    assert adapter.temperature == calibrated.calibration.of(mode).temperature != 1
    again = Cell("source", adapter="calibrated", estimator="oracle", labels="backward-10")
    plain = replace(again, adapter="logit")
    ours, theirs = (run_cell(c, calibrated, images=make_images()) for c in (again, plain))
    assert ours.key != theirs.key
    assert ours.metrics["nll"] != theirs.metrics["nll"]


def test_a_calibrated_adapter_wants_a_calibration(source, stream):
    cell = Cell("source", adapter="calibrated", estimator="oracle")
    with pytest.raises(SettingError, match="twoshift calibrate --source"):
        build(cell, source, None, stream)


def test_an_oracle_is_told_the_stream(source, stream):
    assert estimator_facts("oracle", source, "batch", stream) == {"prior": stream.prior.tolist()}
    assert estimator_facts("ema", source, "batch", stream) == {}


def test_without_calibration_the_cure_is_named(source, stream):
    with pytest.raises(SettingError, match="twoshift calibrate --source"):
        estimator_facts("em", source, "batch", stream)


@pytest.mark.parametrize("estimator", ["ema", "em", "bbse", "rlls", "oracle"])
def test_logit_adjustment_takes_the_cells_estimator(calibrated, stream, estimator):
    assert has_estimator("logit_adjust")
    assert not has_estimator("tent")
    cell = Cell("logit_adjust", estimator=estimator, labels="backward-10", batch_size=16)
    live = build(cell, calibrated, None, stream)
    assert live.estimator == estimator
    result = run_cell(cell, calibrated, images=make_images())
    assert result.metrics["images"] > 0
    if estimator == "oracle":
        assert np.allclose(live.prior.numpy(), stream.prior)
        assert result.metrics["prior_l1"] < 1e-6


@pytest.mark.parametrize(("step", "statistics"), [(True, "batch"), (False, "running")])
def test_logit_adjustment_is_told_of_its_own_statistics(calibrated, stream, step, statistics):
    cell = Cell("logit_adjust", {"step": step}, estimator="em", batch_size=16)
    method = build(cell, calibrated, None, stream)
    assert method.statistics == statistics
    told = getattr(calibrated.calibration, statistics).temperature
    assert method.estimator_settings["temperature"] == told
    assert calibrated.calibration.running.temperature != calibrated.calibration.batch.temperature
