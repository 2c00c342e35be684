from __future__ import annotations

import json
from pathlib import Path

import pytest

from twoshift.cli.ls import Kind, details, entries

ROOT = Path(__file__).resolve().parents[2]

SOME = {
    "methods": ("method", {"source", "bn_stats", "tent", "iabn"}),
    "models": ("model", {"resnet18_cifar"}),
    "datasets": ("data set", {"cifar10", "cifar100", "mnist5k", "digits8x8"}),
    "corruptions": ("corruption", {"gaussian_noise", "contrast", "frost", "saturate"}),
    "orders": ("order", {"shuffled", "correlated", "sorted", "bursts", "markov"}),
    "schedules": ("schedule", {"drift", "switch"}),
    "estimators": ("estimator", {"ema", "fixed", "oracle"}),
    "adapters": ("adapter", {"label_shift", "classwise", "logit", "identity"}),
}

NO_LINK = {"source", "isfda", "pseudo_label", "recommended"}  # not on arXiv


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


@pytest.mark.parametrize("width", [None, 80, 40, 200])
def test_one_line_per_entry_never_wider_than_the_terminal(twoshift, monkeypatch, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = twoshift("ls")
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= (width or 80)
    names = [row["name"] for kind in Kind for row in entries(kind)]
    assert [line.split()[0] for line in lines if line.startswith("  ")] == names
    assert len(lines) == len(names) + len(Kind)
    cut = [line for line in lines if line.endswith("…")]
    assert bool(cut) is (width != 200)


def test_what_is_recommended_is_listed_and_described(twoshift):
    assert "  recommended " in twoshift("ls", "methods")[1]
    code, out, _ = twoshift("ls", "methods", "recommended")
    assert code == 0
    assert "--preset recommended" in out
    assert "twoshift calibrate" in out


def test_details_of_a_method(twoshift):
    code, out, _ = twoshift("ls", "methods", "tent")
    assert code == 0
    text = " ".join(out.split())
    assert "title TENT" in text
    assert "https://arxiv.org/abs/2006.10726" in text
    assert "needs nothing besides the model" in text
    assert "lr 0.001 Learning rate." in text
    assert Path(out.splitlines()[-1].split()[-1]) == ROOT / "docs" / "methods" / "tent.md"
    assert "needs IABN layers" in " ".join(twoshift("ls", "methods", "iabn")[1].split())


@pytest.mark.parametrize("kind", Kind)
def test_every_setting_is_explained_and_every_card_exists(kind):
    for row in entries(kind):
        full = details(kind, row["name"])
        assert {k: v for k, v in full.items() if k in row} == row
        assert set(full["meanings"]) == set(row["settings"])
        assert all(full["meanings"].values()), row["name"]
        assert Path(full["card"]).is_file(), full["card"]


def test_details_as_json_are_a_list_of_one(twoshift):
    (tent,) = json.loads(twoshift("ls", "methods", "tent", "--json")[1])
    assert tent["settings"]["lr"] == 1e-3
    assert tent["meanings"]["lr"] == "Learning rate."


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["methds"], "unknown kind 'methds'. Did you mean 'methods'?"),
        (["spices"], "Known: adapters, alarms, corruptions, datasets, estimators, methods, models"),
        (["orders", "burst"], "unknown order 'burst'. Did you mean 'bursts'?"),
        (["tent"], "unknown kind 'tent'. Type: twoshift ls methods tent"),
        (["methods", "tnet"], "unknown method 'tnet'. Did you mean 'tent'?"),
        (["methods", "recomended"], "Did you mean 'recommended'?"),
        (["corruptions", "contrsat"], "Did you mean 'contrast'?"),
        (["datasets", "cifr10"], "unknown data set 'cifr10'. Did you mean 'cifar10'?"),
    ],
)
def test_an_unknown_name(twoshift, arguments, says):
    code, out, err = twoshift("ls", *arguments)
    assert (code, out) == (2, "")
    assert says in err


def test_alarms_of_a_folder(twoshift, tmp_path):
    from twoshift.watch import Alarm, AlarmLog

    folder = str(tmp_path / "log")
    log = AlarmLog(folder, "gate")
    log.add(Alarm("inputs", "all is dark", "Look.", since=3, raised=9, sure=0.97, ended=30))
    log.add(Alarm("accuracy", "accuracy is low", "Measure.", since=40, raised=90, sure=0.99))
    code, out, err = twoshift("ls", "alarms", folder)
    assert (code, err) == (0, "")
    assert "inputs  gate, image 3 to image 30, 97.0% sure" in out
    assert "accuracy is low. Measure." in out
    assert "image 40 to now" in out
    rows = json.loads(twoshift("ls", "alarms", folder, "--json")[1])
    assert [(row["kind"], row["ended"]) for row in rows] == [("inputs", 30), ("accuracy", None)]
    with log.path.open("a") as file:
        file.write("cut\n")
    assert "1 line could not be read" in twoshift("ls", "alarms", folder)[2]


def test_a_folder_without_alarms(twoshift, tmp_path):
    (tmp_path / "alarms.jsonl").write_text("")
    assert twoshift("ls", "alarms", str(tmp_path))[:2] == (0, "No alarms.\n")
    code, _, err = twoshift("ls", "alarms")
    assert code == 2
    assert "twoshift ls alarms DIR" in err
    code, _, err = twoshift("ls", "alarms", str(tmp_path / "nowhere"))
    assert code == 2
    assert "alarms.jsonl is missing" in err
    assert "alarms" in twoshift("ls", "alarm")[2]
