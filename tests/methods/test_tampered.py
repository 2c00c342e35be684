"""Adaptation states that somebody tampered with, with checksums that fit again."""

import pytest
import torch

from tests.adapters import cases
from tests.methods.test_saving import CONFUSION
from tests.saved import card_in, refit
from tests.toys import CLASSES, make_adapter, make_batches, make_method, make_net
from twoshift import estimators, storage
from twoshift.adapters import attach
from twoshift.errors import CheckpointError, MismatchError, SettingError, TwoshiftError
from twoshift.methods import LabelAware, Method, Source


@pytest.fixture
def live():
    live = make_method("tent", make_net("resnet_bn"), True)
    live(make_batches("resnet_bn")[0])
    return live


def windowed(folder, name="em", **settings):
    net = make_net("mlp")
    estimator = estimators.create(name, CLASSES, window=8, **settings)
    LabelAware(Source(attach(net, make_adapter(net))), estimator).save(folder)
    return net


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("estimator", {"window": 10**12}),
        ("estimator", {"window": 9}),
        ("estimator", {"classes": 10**9}),
        ("estimator", {"classes": 10**9, "window": 10**9}),
        ("adapter", {"classes": 10**9}),
        ("adapter", {"features": 10**9}),
        ("adapter", {"hidden": 10**12}),
        ("adapter", {"classes": 10**9, "features": 10**9, "hidden": 10**9}),
    ],
    ids=str,
)
def test_sizes_that_the_tensors_do_not_have_are_refused(part, changes, tmp_path):
    net = windowed(tmp_path / "s")
    card = card_in(tmp_path / "s")
    card[part]["settings"] |= changes
    refit(tmp_path / "s", card)
    with pytest.raises((CheckpointError, MismatchError), match=r"classes|window|size mismatch"):
        Method.load(tmp_path / "s", net)


def test_a_window_without_its_predictions_is_refused(tmp_path):
    net = windowed(tmp_path / "s")
    path = storage.saved_files(tmp_path / "s")["state"]
    state = storage.read_tensors(path)
    storage.write_tensors(path, {n: t for n, t in state.items() if n != "estimator.rows"})
    card = card_in(tmp_path / "s")
    card["estimator"]["settings"]["window"] = 10**12
    refit(tmp_path / "s", card)
    with pytest.raises(CheckpointError, match=r"estimator\.rows is missing"):
        Method.load(tmp_path / "s", net)


def test_the_steps_of_a_tilt_are_bounded(tmp_path):
    net = windowed(tmp_path / "s", "tilt", source_prior=cases.SHARES)
    card = card_in(tmp_path / "s")
    card["estimator"]["settings"]["steps"] = 10**12
    refit(tmp_path / "s", card)
    with pytest.raises(SettingError, match="steps of tilt, must be at most 10,000"):
        Method.load(tmp_path / "s", net)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": 3}, "method, must be a valid string, got 3"),
        ({"method": "tnet"}, "tent"),
        ({"settings": {"lr": "fast"}}, "lr of the optimiser|lr"),
        ({"settings": {"freeze": 5}}, "does not fit its own card"),
        ({"settings": {"model": 5}}, "does not fit its own card"),
        ({"estimator": {"name": "ema"}}, "estimator.settings, must be given"),
        ({"estimator": {"name": "ema", "settings": {"classes": 0}}}, "classes, must be greater"),
        ({"estimator": {"name": "ema", "settings": {"classes": 5, "name": 1}}}, "does not fit"),
    ],
    ids=str,
)
def test_a_card_with_other_values_is_refused(live, changes, message, tmp_path):
    live.save(tmp_path / "s")
    refit(tmp_path / "s", {**card_in(tmp_path / "s"), **changes})
    with pytest.raises(TwoshiftError, match=message):
        Method.load(tmp_path / "s", make_net("resnet_bn"))


@pytest.mark.parametrize("prior", [[0.5, 0.5], [], "uniform", None, [1e999] * CLASSES])
def test_a_wrong_label_distribution_in_the_card_is_refused(live, prior, tmp_path):
    live.save(tmp_path / "s")
    card = card_in(tmp_path / "s")
    card["adapter"]["prior"] = prior
    refit(tmp_path / "s", card)
    with pytest.raises(CheckpointError, match=r"prior|label distribution|Infinity"):
        Method.load(tmp_path / "s", make_net("resnet_bn"))


@pytest.mark.parametrize("file", ["state", "initial", "adapter", "facts"])
def test_a_file_that_the_card_does_not_list_is_missed(file, tmp_path):
    net = windowed(tmp_path / "s", "bbse", confusion=CONFUSION)
    card = card_in(tmp_path / "s")
    del card["files"][file]
    refit(tmp_path / "s", card)
    with pytest.raises(CheckpointError, match=f"no file '{file}'|confusion"):
        Method.load(tmp_path / "s", net)


def test_a_wrong_initial_state_is_refused_before_a_reset_meets_it(live, tmp_path):
    live.save(tmp_path / "s")
    path = storage.saved_files(tmp_path / "s")["initial"]
    initial = storage.read_tensors(path)
    storage.write_tensors(path, {**initial, "generator": torch.zeros(3)})
    refit(tmp_path / "s", card_in(tmp_path / "s"))
    with pytest.raises(MismatchError, match="state of generator"):
        Method.load(tmp_path / "s", make_net("resnet_bn"))


def test_complex_facts_are_refused(tmp_path):
    net = windowed(tmp_path / "s", "bbse", confusion=CONFUSION)
    path = storage.saved_files(tmp_path / "s")["facts"]
    facts = storage.read_tensors(path)
    storage.write_tensors(path, {name: t.to(torch.complex64) for name, t in facts.items()})
    refit(tmp_path / "s", card_in(tmp_path / "s"))
    with pytest.raises(CheckpointError, match=r"must be real, got torch\.complex64"):
        Method.load(tmp_path / "s", net)
