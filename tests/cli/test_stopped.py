"""What commands say after Ctrl-C is true of them; colours and errors of the surroundings."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from tests.cli.conftest import SMALL
from tests.cli.test_help import commands
from twoshift import cli
from twoshift.bench.store import Store
from twoshift.train import loop

ROOT = Path(__file__).resolve().parents[2]
CONTINUES = "The same command continues"
# commands that the same command continues; the others have nothing to continue
RESUME = {
    ("train", "source"),
    ("train", "adapter"),
    ("data", "get"),
    ("demo",),
    ("bench",),
    ("predict",),
}


def stop(*_arguments, **_settings):
    raise KeyboardInterrupt


GROUPS = {("data",), ("train",), ("recipe",), ("export",)}
LEAVES = [p for p in commands() if p and p not in GROUPS]


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_only_what_resumes_says_so(path):
    command = typer.main.get_command(cli.app)
    for name in path:
        command = command.commands[name]
    assert (CONTINUES in command.callback.when_stopped) is (path in RESUME)


def test_a_stopped_bench_keeps_its_results(twoshift, monkeypatch, tmp_path):
    monkeypatch.setattr("twoshift.bench.run.missing", stop)
    where = ["--store", tmp_path / "r.db", "--models", tmp_path / "models"]
    code, _, err = twoshift("bench", "demo", *where)
    assert code == 130
    assert err.strip() == "Stopped. The same command continues: results so far are stored."


def test_a_stopped_export_wrote_no_file(twoshift, monkeypatch, tmp_path):
    Store(tmp_path / "r.db").close()
    monkeypatch.setattr("twoshift.bench.store.Store.results", stop)
    code, _, err = twoshift("export", tmp_path / "r.db", "--to", "csv", "--out", tmp_path / "x.csv")
    assert (code, err.strip()) == (130, "Stopped. The file was not written.")
    assert [f.name for f in tmp_path.iterdir()] == ["r.db"]


def test_a_stopped_training_goes_on(twoshift, monkeypatch, tmp_path):
    real, epochs = loop.run_epoch, []

    def second_stops(*arguments, **settings):
        epochs.append(1)
        return stop() if len(epochs) == 2 else real(*arguments, **settings)

    command = ["train", "source", *SMALL, "--set", "epochs=2", "--out", tmp_path / "out"]
    monkeypatch.setattr(loop, "run_epoch", second_stops)
    code, _, err = twoshift(*command)
    assert code == 130
    assert CONTINUES in err
    assert twoshift(*command)[0] == 0
    assert len(epochs) == 3  # the first epoch was not trained again


@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_is_obeyed_on_a_terminal(no_color):
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "twoshift.cli", "ls", "methds"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": no_color, "TERM": "xterm"},
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        text = os.read(ours, 10_000).decode()
        assert process.wait(60) == 2
    os.close(ours)
    assert "Did you mean 'methods'?" in text
    assert ("\x1b[" in text) is not bool(no_color)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_output_that_cannot_be_written_and_characters_that_a_terminal_lacks():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    program = [sys.executable, "-m", "twoshift.cli"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*program, "--version"],
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    command = [*program, "ls", "corruptions"]
    plain = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert plain.returncode == 0
    assert plain.stdout.isascii()
