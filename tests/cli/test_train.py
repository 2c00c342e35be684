from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import SMALL, SMALL_ADAPTER, on_pictures
from twoshift import cli
from twoshift.adapters import load_adapter
from twoshift.cli.train import assignments
from twoshift.errors import SettingError
from twoshift.train import devices, loop
from twoshift.train.checkpoint import load_source

ROOT = Path(__file__).resolve().parents[2]


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
        (["--set", "epochs=[1"], "value of epochs is not YAML"),
        (["--set", "epochs=" + "[" * 5000], "at most 20 levels deep"),
        (["--recipe", "dem"], "Did you mean 'demo'?"),
        (["--set", "strategy=balanced_softmx"], "Did you mean 'balanced_softmax'?"),
        (["--set", "decoding.sise=8"], "Did you mean 'size'? Known: frame, size, squash."),
    ],
)
def test_a_wrong_option_is_a_sentence(digits, twoshift, options, says):
    code, out, err = twoshift("train", "source", *SMALL, *options, "--out", digits.source)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


MISTYPED = {
    "epohcs=1": "Did you mean 'epochs'?",
    "settings.nrom=iabn": "Did you mean 'norm'?",
    "settings.norm=iabm": "Did you mean 'iabn'?",
    "settings.width=0": "width",
    "architecture=resnet18_cifr": "Did you mean 'resnet18_cifar'?",
    "dataset=digit8x8": "Did you mean 'digits8x8'?",
    "profile=exponentiel": "Did you mean 'exponential'?",
}
MISTYPED_OF_ADAPTER = {
    "epohcs=1": "Did you mean 'epochs'?",
    "adapter.hiden=3": "Did you mean 'hidden'?",
    "adapter.name=labelshift": "Did you mean 'label_shift'?",
    "adapter.dw=clas": "must be one of",
}


@pytest.mark.parametrize("change", MISTYPED)
def test_a_mistyped_setting_of_a_source_leaves_nothing_behind(twoshift, change, tmp_path):
    where = ("--out", tmp_path / "runs" / "new", "--set", change)
    code, out, err = twoshift("train", "source", *SMALL, *where)
    assert (code, out) == (2, "")
    assert MISTYPED[change] in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", MISTYPED_OF_ADAPTER)
def test_a_mistyped_setting_of_an_adapter_leaves_nothing_behind(twoshift, digits, change, tmp_path):
    where = ("--source", digits.source, "--out", tmp_path / "runs" / "new", "--set", change)
    code, out, err = twoshift("train", "adapter", *SMALL_ADAPTER, *where)
    assert (code, out) == (2, "")
    assert MISTYPED_OF_ADAPTER[change] in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"\xff\xfe\0bad", ": recipe "), (None, "cannot read recipe")],
    ids=["not-text", "folder"],
)
def test_a_recipe_that_cannot_be_read(twoshift, content, says, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.mkdir() if content is None else recipe.write_bytes(content)
    code, _, err = twoshift("train", "source", "--recipe", recipe, "--out", tmp_path / "out")
    assert code == 2
    assert says in err
    assert "writ" not in err
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
    assert "Stopped. The same command continues after the last epoch" in err
    assert list(tmp_path.iterdir()) == []  # it had not finished one


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


# -- several devices --------------------------------------------------------------------------

BREAK = """
import os, sys

if os.environ.get("RANK") == "1" and "twoshift" in " ".join(sys.orig_argv):
    from twoshift.errors import SettingError
    from twoshift.train import loop

    def run_epoch(*_arguments, **_settings):
        raise SettingError("the second device is on fire")

    loop.run_epoch = run_epoch
"""
# at 8 pixels narrower groups, or larger steps, make rounding errors visible in the weights
CALM = ["augment=none", "batch_size=33", "lr=1e-3", "settings.norm=gn", "settings.width=16"]
GROUPS = [part for change in CALM for part in ("--set", change)]


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "twoshift.cli", "train", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_process_that_fails_ends_the_others_with_its_message(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BREAK)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    out = ("--devices", 2, "--out", tmp_path / "out")
    done = command("source", *SMALL, *out, PYTHONPATH=path)
    assert done.returncode == 2
    assert "SettingError: the second device is on fire" in done.stderr
    assert "one of 2 processes failed with exit code 2, and the others were stopped" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "card.json").exists()


@pytest.mark.slow
def test_devices_share_a_batch_and_end_where_one_does(tmp_path):
    for count in (1, 2):
        folder = tmp_path / str(count)
        also = ("--devices", count)
        made = command("source", *SMALL, *GROUPS, *also, "--out", folder / "source")
        assert made.returncode == 0, made.stderr
        assert made.stdout.count("source model in") == 1
        where = ("--source", tmp_path / "1" / "source", "--out", folder / "adapter")
        made = command("adapter", *SMALL_ADAPTER, "--set", "augment=none", *where, *also)
        assert made.returncode == 0, made.stderr
        assert made.stdout.count("adapter in") == 1
    one, two = (load_source(tmp_path / d / "source").model.state_dict() for d in "12")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-4, msg=name)
    one, two = (load_adapter(tmp_path / d / "adapter").state_dict() for d in "12")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-4, msg=name)


def test_one_of_torchruns_processes_does_not_start_others(digits, twoshift, monkeypatch):
    monkeypatch.setattr(devices, "launch", lambda *_: pytest.fail("started processes"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    code, out, _ = twoshift("train", "source", *SMALL, "--devices", 2, "--out", digits.source)
    assert (code, out) == (0, "")  # only the first of them speaks


def test_the_command_itself_is_run_by_all_devices(twoshift, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(devices, "launch", lambda *given: started.append(given))
    arguments = ("train", "source", *SMALL, "--devices", "3", "--out", str(tmp_path / "out"))
    assert twoshift(*arguments)[0] == 0
    assert started == [(3, list(arguments))]
    code, _, err = twoshift(*arguments, "--set", "epohcs=1")
    assert (code, len(started)) == (2, 1)  # a misspelling is told once, before they start
    assert "Did you mean 'epochs'" in err


def test_images_that_cannot_be_read_are_skipped_on_demand(twoshift, pictures, tmp_path):
    where = (*on_pictures(pictures), "--out", tmp_path / "out")
    code, _, err = twoshift("train", "source", *where)
    assert code == 2
    assert "--skip-bad" in err
    code, out, _ = twoshift("train", "source", *where, "--skip-bad")
    assert (code, out) == (0, f"source model in {tmp_path / 'out'}: skipped 1\n")


@pytest.mark.parametrize(("subset", "told"), [({}, "0"), ({"skipped": 12345}, "12,345")])
def test_a_trained_model_says_how_many_images_were_skipped(
    digits, twoshift, monkeypatch, subset, told
):
    found = load_source(digits.source)
    found.card.subset.update(subset)
    monkeypatch.setattr("twoshift.train.source.load_source", lambda folder: found)
    code, out, _ = twoshift("train", "source", *SMALL, "--out", digits.source, "--skip-bad")
    assert (code, out) == (0, f"{digits.printed[0].strip()}, skipped {told}\n")
