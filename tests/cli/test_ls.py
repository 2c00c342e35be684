from __future__ import annotations

import json

import pytest

from twoshift.cli.ls import Kind, entries

SOME = {
    "methods": ("method", {"source", "bn_stats", "tent", "iabn"}),
    "models": ("model", {"resnet18_cifar"}),
    "datasets": ("data set", {"cifar10", "cifar100", "mnist5k", "digits8x8"}),
    "corruptions": ("corruption", {"gaussian_noise", "contrast", "frost", "saturate"}),
    "estimators": ("estimator", {"ema", "fixed", "oracle"}),
    "adapters": ("adapter", {"label_shift", "classwise", "logit", "identity"}),
}

NO_LINK = {"source", "isfda", "pseudo_label"}  # not on arXiv


def test_every_kind_is_tried_here():
    assert set(SOME) == set(Kind)


@pytest.mark.parametrize("kind", SOME)
def test_json_is_a_list_of_objects(twoshift, kind):
    code, out, err = twoshift("ls", kind, "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    called, some = SOME[kind]
    assert some <= {row["name"] for row in rows}
    for row in rows:
        origin = {"title", "reference", "needs"} if kind == "methods" else set()
        assert set(row) == {"kind", "name", "description", "settings", *origin}
        assert row["kind"] == called
        assert row["description"].endswith((".", ")")) or ":" in row["description"]


def test_settings_are_the_defaults(twoshift):
    rows = json.loads(twoshift("ls", "methods", "--json")[1])
    (tent,) = [row for row in rows if row["name"] == "tent"]
    assert tent["settings"] == {"lr": 1e-3, "optim": "adam", "freeze": []}


def test_methods_say_what_they_are_called_need_and_come_from():
    rows = {row["name"]: row for row in entries(Kind.methods)}
    assert rows["iabn"]["needs"] == ["IABN layers"]
    assert rows["tent"]["title"] == "TENT"
    for row in rows.values():
        assert row["title"]
        assert "http" in row["reference"] or row["name"] in NO_LINK, row["name"]
    titles = [row["title"] for row in rows.values()]
    assert len(set(titles)) == len(titles)


def test_all_kinds_by_default(twoshift):
    rows = json.loads(twoshift("ls", "--json")[1])
    assert rows == json.loads(json.dumps([row for kind in Kind for row in entries(kind)]))


def test_a_table_for_people(twoshift, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = twoshift("ls", "estimators")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["kind", "name", "description", "needs", "settings"]
    (ema,) = [line for line in lines if line.split()[:2] == ["estimator", "ema"]]
    assert "alpha=0.1" in ema


def test_unknown_kind(twoshift):
    code, out, err = twoshift("ls", "spices")
    assert (code, out) == (2, "")
    assert "spices" in err
    assert all(kind in " ".join(err.split()) for kind in ("methods", "estimators"))
