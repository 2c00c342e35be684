"""Cells from names, presets and settings."""

import pytest

from twoshift.bench import Cell, make_cell
from twoshift.errors import SettingError, UnknownName


def test_without_names_it_is_the_default():
    assert make_cell() == Cell("tent")


def test_a_preset_gives_settings_and_changes_go_first():
    cell = make_cell("imagenet-c", adapter="identity", settings={"lr": 0.5}, labels="forward-10")
    assert cell.settings == {"lr": 0.5, "optim": "sgd", "freeze": ["layer4"]}
    assert cell.estimator_settings == {"top_k": 3}
    assert cell.labels == "forward-10"


def test_a_preset_may_name_method_adapter_and_estimator():
    cell = make_cell("recommended")
    assert (cell.method, cell.adapter, cell.estimator) == ("streamed", "calibrated", "paced")
    assert make_cell("recommended", estimator="oracle").method == "streamed"
    assert make_cell("recommended", adapter=None, estimator="ema").adapter is None


def test_an_estimator_without_use_has_no_settings():
    assert make_cell("imagenet-c").estimator_settings == {}


def test_other_settings_on_iabn_layers():
    plain, iabn = (make_cell("cifar10-c", method="im_loss", with_iabn=w) for w in (False, True))
    assert plain.settings["lr"] != iabn.settings["lr"] == 1e-4


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        ({"preset": "cifar10"}, UnknownName, "unknown preset 'cifar10'. Did you mean 'cifar10-c'"),
        ({"method": "tend"}, UnknownName, "Did you mean 'tent'"),
        ({"settings": {"lrr": 1}}, SettingError, "row 'x': method 'tent' has no setting 'lrr'"),
        ({"adapter": "none"}, UnknownName, "row 'x': unknown adapter 'none'"),
        ({"adapter": "logit", "estimator": "emm"}, UnknownName, "Did you mean 'em'"),
        (
            {"adapter": "logit", "estimator_settings": {"alfa": 1}},
            SettingError,
            "row 'x': estimator 'ema' has no setting 'alfa'",
        ),
        ({"estimator": "oracle"}, SettingError, "row 'x': estimator 'oracle', must be used tog"),
        ({"estimator_settings": {"alpha": 0.5}}, SettingError, "used together with an adapter"),
        ({"corruption": "contrst"}, UnknownName, "Did you mean 'contrast'"),
    ],
)
def test_what_does_not_exist_is_refused(request_, error, says):
    with pytest.raises(error, match=says):
        make_cell(**request_, whose="row 'x': ")
