from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer.main

from twoshift import __version__
from twoshift.cli import app

# all in one process: after every page it says whether torch has been imported by then
PAGES = """
import json, sys
from typer.testing import CliRunner
from twoshift.cli import app
pages = []
for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments)
    pages.append([result.exit_code, result.output, "torch" in sys.modules])
print(json.dumps(pages))
"""


def commands(group=None, path=()) -> list[tuple[str, ...]]:
    group = typer.main.get_command(app) if group is None else group
    found = [path]
    for name, command in getattr(group, "commands", {}).items():
        found += commands(command, (*path, name))
    return found


def test_every_command_is_known_here():
    leaves = {("data", "get"), ("data", "ls"), ("train", "source"), ("train", "adapter")}
    assert {*commands()} >= {(), ("ls",), ("run",), ("demo",), ("data",), ("train",), *leaves}


@pytest.fixture(scope="module")
def pages() -> dict[tuple[str, ...], tuple[int, str, bool]]:
    wanted = [*[[*path, "--help"] for path in commands()], ["--version"], ["-h"], []]
    done = subprocess.run(
        [sys.executable, "-c", PAGES, json.dumps(wanted)],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "100", "PATH": ""},
    )
    return dict(zip(map(tuple, wanted), map(tuple, json.loads(done.stdout)), strict=True))


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_help_has_an_example_and_does_not_import_torch(pages, path):
    code, text, torch = pages[*path, "--help"]
    assert code == 0
    assert not torch
    assert "Usage: twoshift" in text
    assert f"Example: twoshift {' '.join(path)}".rstrip() in " ".join(text.split())


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_examples_can_be_typed(path):
    """Every option of an example exists, and nothing that must be given is missing."""
    import shlex

    command = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    _, _, example = (command.epilog or "").partition("Example: twoshift ")
    words = shlex.split(example.partition(" > ")[0])
    command, context = typer.main.get_command(app), None
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    context = command.make_context("twoshift", words)  # raises what a user would see
    assert context.params


def test_short_help_is_help(pages):
    assert pages["-h",] == pages["--help",]


def test_no_arguments_is_help(pages):
    assert pages[()][1].strip() == pages["--help",][1].strip()


def test_version(pages):
    assert pages["--version",] == (0, f"twoshift {__version__}\n", False)


def test_help_tells_the_default_data_folder(pages):
    assert "$TWOSHIFT_DATA" in pages["data", "get", "--help"][1]
