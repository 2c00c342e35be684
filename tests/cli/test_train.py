from __future__ import annotations

import json

import pytest

from tests.cli.conftest import SMALL, SMALL_ADAPTER
from twoshift import cli
from twoshift.adapter import load_adapter
from twoshift.cli.train import assignments
from twoshift.errors import SettingError
from twoshift.train import loop
from twoshift.train.checkpoint import load_source


def test_source_is_what_the_options_say(digits):
    card = load_source(digits.source).card
    assert (card.dataset, card.subset["ratio"], card.recipe["epochs"]) == ("digits8x8", 10, 1)
    assert (card.settings["width"], card.settings["channels"]) == (8, 1)
    assert card.class_counts == sorted(card.class_counts, reverse=True)
    assert card.class_counts[0] == 10 * card.class_counts[-1]


def test_source_says_where_and_how_good(digits):
    measured = load_source(digits.source).card.measured
    facts = ", ".join(f"{name} {value:.4g}" for name, value in measured.items())
    assert digits.printed[0] == f"source model in {digits.source}: {facts}\n"
    assert "balanced_accuracy_held_out" in facts


def test_adapter_belongs_to_its_source(digits):
    card = json.loads((digits.adapter / "card.json").read_text())
    assert card["training"]["source"] == load_source(digits.source).weights
    count = sum(p.numel() for p in load_adapter(digits.adapter).parameters())
    assert digits.printed[1] == f"adapter in {digits.adapter}: {count:,} parameters\n"


def test_the_same_command_again_does_not_train(digits, twoshift, monkeypatch):
    def refuse(*_arguments, **_settings):
        raise AssertionError("trained again")

    monkeypatch.setattr(loop, "run_epoch", refuse)
    files = [*digits.source.iterdir(), *digits.adapter.iterdir()]
    before = {f: f.stat().st_mtime_ns for f in files}
    code, out, _ = twoshift("train", "source", *SMALL, "--out", digits.source)
    assert (code, out) == (0, digits.printed[0])
    where = ("--source", digits.source, "--out", digits.adapter)
    code, out, _ = twoshift("train", "adapter", *SMALL_ADAPTER, *where)
    assert (code, out) == (0, digits.printed[1])
    assert {f: f.stat().st_mtime_ns for f in files} == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--set", "epochs=2"], "other settings (recipe.epochs)"),
        (["--seed", "1"], "other settings (seed)"),
        (["--set", "epoch=2"], "Did you mean 'epochs'?"),
        (["--set", "epochs"], "must be NAME=VALUE, got epochs"),
        (["--set", "epochs=many"], "setting 'epochs' of recipe demo"),
        (["--set", "epochs=[1"], "value of epochs, must be a YAML value"),
        (["--recipe", "dem"], "Did you mean 'demo'?"),
    ],
)
def test_a_wrong_option_is_a_sentence(digits, twoshift, options, says):
    code, out, err = twoshift("train", "source", *SMALL, *options, "--out", digits.source)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_data_that_are_not_here(twoshift, tmp_path):
    code, _, err = twoshift("train", "source", "--data", tmp_path, "--out", tmp_path / "out")
    assert code == 2
    assert "twoshift data get cifar10" in err


def test_an_adapter_needs_a_source(twoshift, tmp_path):
    code, _, err = twoshift("train", "adapter", "--source", tmp_path, "--out", tmp_path / "out")
    assert code == 2
    assert f"no source model in {tmp_path}" in err


def test_interrupting_says_how_to_go_on(twoshift, monkeypatch, tmp_path):
    def stop(*_arguments, **_settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "run_epoch", stop)
    code, _, err = twoshift("train", "source", *SMALL, "--out", tmp_path / "out")
    assert code == 130
    assert "The same command again goes on with a training" in err


def test_errors_that_are_not_the_users_are_not_hidden(monkeypatch):
    def broken():
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_assignments():
    given = ["lr=1e-3", "n=3", "on=true", "name=a=b", "none=null", "f=[layer4, fc]", "s.a.b=x"]
    assert assignments(given) == {
        "lr": 1e-3,
        "n": 3,
        "on": True,
        "name": "a=b",
        "none": None,
        "f": ["layer4", "fc"],
        "s": {"a": {"b": "x"}},
    }
    assert assignments(["s.a=1", "s.b=2", "s.a=3"]) == {"s": {"a": 3, "b": 2}}
    assert assignments(None) == {}


def test_a_setting_cannot_be_a_value_and_a_group():
    with pytest.raises(SettingError, match="settings"):
        assignments(["settings=3", "settings.norm=iabn"])
