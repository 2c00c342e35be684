"""Presets: the paper's settings by name, for every method, and nothing that a method lacks."""

import itertools

import pytest

from twoshift.bench import presets
from twoshift.bench.presets import estimator_preset, preset
from twoshift.errors import UnknownName
from twoshift.estimators import estimators
from twoshift.methods import methods
from twoshift.registry import check_settings

BENCHMARKS = ["cifar10-c", "cifar100-c", "imagenet-c", "visda-c", "office-home", "domainnet"]
WITHOUT_SETTINGS = {"source", "bn_stats", "dart", "decoupled", "matched", "streamed", "hybrid_ttn"}
WITHOUT_SETTINGS |= {"balanced_bn"}
FROZEN = {"freeze": ["layer4"]}


def test_one_for_every_benchmark():
    assert presets.names() == ["recommended", *BENCHMARKS, "pacs"]
    assert presets.of_dataset("office_home:clipart") == "office-home"
    assert [presets.of_dataset(d) for d in ("cifar10", "cifar100")] == BENCHMARKS[:2]
    assert presets.of_dataset("mnist5k") is None


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_method_is_in_it_with_settings_that_it_has(name):
    there = presets._named(name)["methods"]
    assert set(there) == set(methods) - WITHOUT_SETTINGS
    for method, settings in there.items():
        check_settings(method, methods[method], settings)
    for estimator, settings in presets._named(name).get("estimator", {}).items():
        check_settings(estimator, estimators[estimator], settings)


@pytest.mark.parametrize(
    ("method", "plain", "frozen"),
    [
        ("source", {}, {}),
        ("bn_stats", {}, {}),
        ("tent", {"lr": 1e-3, "optim": "adam"}, FROZEN),
        ("iabn", {"lr": 1e-4, "optim": "adam", "momentum": 0.01}, FROZEN),
        ("onda", {"update_every": 10, "momentum": 0.1}, {}),
    ],
)
def test_layers_are_frozen_only_with_an_adapter_and_only_where_that_can_be(method, plain, frozen):
    for name in ("cifar10-c", "cifar100-c"):
        assert preset(name, method, with_adapter=False) == plain
        assert preset(name, method, with_adapter=True) == {**plain, **frozen}
    assert "freeze" not in preset("visda-c", method, with_adapter=True)


@pytest.mark.parametrize("name", [*BENCHMARKS, "pacs"])
def test_with_an_adapter_roid_leaves_the_labels_to_it(name):
    assert "correction" not in preset(name, "roid", with_adapter=False)
    assert preset(name, "roid", with_adapter=True)["correction"] == "none"
    assert "correction" not in preset(name, "tent", with_adapter=True)


@pytest.mark.parametrize("name", ["cifar10-c", "cifar100-c"])
def test_on_iabn_layers_the_im_loss_steps_as_iabn_does(name):
    assert preset(name, "im_loss", with_adapter=False)["lr"] == 1e-3
    iabn = preset(name, "iabn", with_adapter=False)["lr"]
    assert preset(name, "im_loss", with_adapter=False, with_iabn=True)["lr"] == iabn
    plain = preset(name, "tent", with_adapter=True)
    assert preset(name, "tent", with_adapter=True, with_iabn=True) == plain


# supplementary A.2, in the order of BENCHMARKS
LISTED = {
    ("tent", "lr"): [1e-3, 1e-3, 2.5e-4, 5e-5, 5e-5, 1e-3],
    ("pseudo_label", "lr"): [1e-3, 1e-3, 2.5e-4, 5e-5, 5e-5, 1e-3],
    ("cotta", "confidence_threshold"): [0.92, 0.72, 0.01, 0.01, 0.01, 0.01],
    ("cotta", "restore"): [0.01] * 6,
    ("cotta", "teacher_momentum"): [0.999] * 6,
    ("note", "momentum"): [0.01, 0.01, 0.1, 0.1, 0.1, 0.1],
    ("iabn", "momentum"): [0.01, 0.01, 0.1, 0.1, 0.1, 0.1],
    ("note", "capacity"): [64] * 6,
    ("lame", "k"): [5] * 6,
    ("onda", "update_every"): [10] * 6,
    ("onda", "momentum"): [0.1] * 6,
}


@pytest.mark.parametrize(("method", "setting"), LISTED)
def test_what_the_paper_lists(method, setting):
    got = [preset(name, method, with_adapter=False)[setting] for name in BENCHMARKS]
    assert got == LISTED[method, setting]


def test_estimator_settings():
    assert estimator_preset("imagenet-c", "ema") == {"top_k": 3}
    assert estimator_preset("cifar10-c", "ema") == {}
    assert estimator_preset(None, "ema") == {}


def test_what_comes_back_is_the_callers():
    for name, method in itertools.product(BENCHMARKS, ("tent", "lame")):
        preset(name, method, with_adapter=True)["lr"] = "spoilt"
        assert preset(name, method, with_adapter=True).get("lr") != "spoilt"


def test_unknown_names():
    assert preset(None, "tent", with_adapter=True) == {}
    with pytest.raises(UnknownName, match="Did you mean 'cifar10-c'"):
        preset("cifar10c", "tent", with_adapter=True)
    with pytest.raises(UnknownName, match="Did you mean 'tent'"):
        preset("cifar10-c", "tend", with_adapter=True)


def test_what_is_recommended_is_named_and_the_others_leave_it_open():
    use = presets.combination("recommended")
    assert use == {"method": "streamed", "adapter": "calibrated", "estimator": "paced"}
    assert use["method"] in methods
    assert use["estimator"] in estimators
    assert all(presets.combination(name) == {} for name in [None, *BENCHMARKS])
