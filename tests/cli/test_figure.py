from __future__ import annotations

import pytest


def test_a_figure_is_written_and_said(twoshift, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "labels.svg"
    code, text, _ = twoshift("figure", "label-distributions", "--data", tmp_path, "--out", out)
    assert code == 0
    assert text == f"label-distributions in {out}\n"
    assert "<svg" in out.read_text()


def test_the_file_has_the_name_of_the_figure(twoshift, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert twoshift("figure", "label-distributions", "--data", tmp_path)[0] == 0
    assert [file.name for file in tmp_path.iterdir()] == ["label-distributions.svg"]


def test_without_a_name_all_are_listed(twoshift):
    code, text, _ = twoshift("figure")
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == [
        "accuracy-shift",
        "label-distributions",
        "label-estimate-cifar10",
        "label-estimate-cifar100",
        "tau-boundary",
        "tsne",
    ]


def test_a_misspelt_name(twoshift):
    code, _, error = twoshift("figure", "tnse")
    assert code == 2
    assert "Did you mean 'tsne'" in error
