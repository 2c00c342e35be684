"""What is in the package, and whether it works where nothing else is installed."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import twoshift

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "twoshift"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_versions_agree():
    assert re.fullmatch(r"\d+\.\d+\.\d+", twoshift.__version__)
    assert importlib.metadata.version("twoshift") == twoshift.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == twoshift.__version__


def test_types_are_shipped():
    assert (PACKAGE / "py.typed").is_file()


def test_licence():
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "END OF TERMS AND CONDITIONS" in text
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["license"] == "Apache-2.0"


def test_every_extra_that_is_named_exists():
    pages = [*PACKAGE.rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {
        extra.strip()
        for page in pages
        for extras in re.findall(r"(?:twoshift|\.)\[([a-z, ]+)\]", page.read_text())
        for extra in extras.split(",")
    }
    assert named >= {"plots", "demo"}  # the search finds something
    assert named <= set(PROJECT["optional-dependencies"])


def test_the_changelog_begins_with_what_is_not_released():
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "UNRELEASED"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_all_files_are_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    kinds = ("*.py", "*.pyi", "*.yaml", "*.csv", "*.html", "*.css", "*.js", "py.typed")
    files = {str(f.relative_to(ROOT)) for kind in kinds for f in PACKAGE.rglob(kind)}
    assert {"twoshift/py.typed", "twoshift/__init__.pyi", "twoshift/bench/presets.yaml"} <= files
    assert files <= inside
    assert not [f for f in inside if f.startswith(("tests", "docs", "benchmarks", "reproduction"))]
    assert any(f.endswith("licenses/LICENSE") for f in inside)


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    programs = tmp_path / "env" / "bin"

    def run(*command: object) -> str:
        done = subprocess.run(
            [str(programs / str(command[0])), *map(str, command[1:])],
            capture_output=True,
            text=True,
            cwd=tmp_path,  # not in the repository, whose files would be imported
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
    assert run("twoshift", "--version") == f"twoshift {twoshift.__version__}\n"
    listed = run("twoshift", "ls")
    assert all(name in listed for name in ("tent", "resnet18_cifar", "cifar10", "fog", "ema"))
    # recipes and constants are found where the wheel put them
    found = run(
        "python",
        "-c",
        "from twoshift.train.recipes import SourceRecipe, load_recipe\n"
        "from twoshift.data.corruptions import constants\n"
        "from twoshift.bench import preset\n"
        "import twoshift.testing\n"  # needs no pytest
        "print(load_recipe(SourceRecipe, 'cifar').epochs, constants('fog', 32, 5),"
        " preset('cifar10-c', 'tent', False)['lr'])",
    )
    assert found.split() == ["200", "[1.5,", "1.75]", "0.001"]
