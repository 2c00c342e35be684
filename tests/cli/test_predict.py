"""``twoshift predict``: a folder in, a table out."""

from __future__ import annotations

import csv
import shutil

import numpy as np
import pytest
import torch

from tests.predict.small import MY_NET, SIDE, known_of, make_net, write_images


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """What a user has: a model with its facts, images, and the options that name them."""
    monkeypatch.setenv("TWOSHIFT_DATA", str(tmp_path / "data"))
    known = known_of(make_net)
    (tmp_path / "my_net.py").write_text(MY_NET)
    torch.save(known.net.state_dict(), tmp_path / "w.pth")
    known.facts.save(tmp_path / "facts")
    write_images(tmp_path / "images", 70)
    return {
        "images": tmp_path / "images",
        "--model": f"{tmp_path / 'my_net.py'}:make_net",
        "--weights": tmp_path / "w.pth",
        "--calibration": tmp_path / "facts",
        "-o": tmp_path / "out.csv",
        "--frame": SIDE,
    }


def words(desk, **others):
    """The command line; None leaves an option out, and an empty one has no value."""
    named = {n if n == "-o" else f"--{n.replace('_', '-')}": v for n, v in others.items()}
    pairs = {**desk, **named}
    first = pairs.pop("--images", pairs["images"])
    pairs.pop("images")
    given = [
        part for n, v in pairs.items() if v is not None for part in ((n,) if v == "" else (n, v))
    ]
    return ["predict", first, *given]


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_folder_to_a_table(desk, twoshift, tmp_path):
    code, out, err = twoshift(*words(desk, top=2))
    assert code == 0, err
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "Streamed statistics" in lines["method"]
    assert lines["images"].split() == ["images", "70"]
    assert "(training " in lines["labels"]
    assert "expected" in lines["accuracy"]
    assert "against the unadapted model" in lines["changed"]
    table = rows(tmp_path / "out.csv")
    assert len(table) == 70
    assert {*table[0]} >= {"path", "class", "probability", "class_2", "unadapted", "batch"}
    assert twoshift(*words(desk, top=2))[0] == 0  # the same again
    code, out, err = twoshift(*words(desk))
    assert (code, "table" in out) == (2, False)
    assert "Start anew: --overwrite" in err
    assert twoshift(*words(desk, overwrite="", no_baseline=""))[0] == 0
    assert "unadapted" not in rows(tmp_path / "out.csv")[0]


def test_unreadable_images_have_rows_and_an_exit_code(desk, twoshift, tmp_path):
    bad = tmp_path / "images" / "x" / "0003.png"
    bad.write_bytes(b"gone")
    code, out, _ = twoshift(*words(desk))
    assert code == 3
    assert f"unread    1, the first: cannot decode {bad}" in out
    (row,) = [row for row in rows(tmp_path / "out.csv") if row["error"]]
    assert row["path"] == str(bad)
    assert twoshift(*words(desk))[0] == 3  # the same again


def test_another_method_and_streams(desk, twoshift, tmp_path):
    others = {"method": "tent", "method_set": "lr=1e-3", "adapter": "logit", "group_by": "folder"}
    code, out, err = twoshift(*words(desk, **others, state=tmp_path / "state"))
    assert code == 0, err
    assert "TENT" in out
    assert {row["stream"] for row in rows(tmp_path / "out.csv")} == {"x", "y"}
    assert (tmp_path / "state" / "x" / "card.json").exists()


def test_a_model_of_ours(digits, twoshift, tmp_path):
    source = shutil.copytree(digits.source, tmp_path / "source")
    code, _, err = twoshift("calibrate", "--source", source, "--folds", 0)
    assert code == 0, err
    images = np.random.default_rng(0).integers(0, 255, (20, 8, 8), np.uint8)
    np.savez(tmp_path / "a.npz", images=images)
    out = tmp_path / "out.csv"
    code, _, err = twoshift("predict", tmp_path / "a.npz", "--source", source, "-o", out)
    assert code == 0, err
    assert rows(out)[0]["path"] == "a.npz:0"


def test_a_page(desk, twoshift, tmp_path):
    pytest.importorskip("jinja2")
    write_images(tmp_path / "images", 70, dark=0.3)
    code, out, err = twoshift(*words(desk, report=tmp_path / "page.html", batch_size=16))
    assert code == 0, err
    assert f"page      {tmp_path / 'page.html'}" in out
    page = (tmp_path / "page.html").read_text()
    assert "Labels over time" in page
    assert "Changed most" in page
    assert page.count("data:image/png;base64,") >= 1


def test_offline(desk, twoshift, tmp_path):
    code, _, err = twoshift(*words(desk, offline="", group_by="folder"))
    assert code == 0, err
    table = rows(tmp_path / "out.csv")
    assert {row["state_version"] for row in table} == {"1"}
    assert "batch" not in table[0]


def test_ctrl_c(desk, twoshift, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("twoshift.predict.online.Online.run", stop)
    code, _, err = twoshift(*words(desk))
    assert code == 130
    assert "Stopped. The same command continues: what was finished is kept." in err


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"model": None}, "must be given --model or --source, got neither"),
        ({"source": "x"}, "must be given --model or --source, got both"),
        ({"calibration": None}, "must be given --calibration"),
        ({"calibration": "{}/absent"}, "absent"),
        ({"images": "{}/absent"}, "absent does not exist"),
        ({"images": "{}/empty"}, "no images in"),
        ({"out": "{}/out.txt", "-o": None}, "FILE.parquet or FILE.csv"),
        ({"out": "{}/w.pth/out.csv", "-o": None}, "must be a folder that can be written"),
        ({"method": "tnet"}, "Did you mean 'tent'?"),
        ({"adapter": "logit"}, "with the recommended method"),
        ({"method": "tent", "estimator": "em"}, "used with an adapter"),
        ({"method": "tent", "adapter": "classwise"}, "a trained one"),
        ({"method": "tent", "adapter": "{}/absent"}, "absent"),
        ({"top": 4}, "must be 1 to 3"),
        ({"launch": "dusk"}, "Did you mean 'dask'"),
        ({"scheduler": "tcp://127.0.0.1:1"}, "must be used with --launch dask"),
        ({"workers": 2}, "must be used with processes of this run"),
        ({"offline": "", "state": "{}/state"}, "must be used with an online run"),
        ({"passes": 2, "method": "tent"}, "so that their order matters: it runs online only"),
        ({"order": "tmie"}, "Did you mean 'time'?"),
        ({"group_by": "camera"}, "no column 'camera'"),
        ({"size": 9}, "size of the images, must be 1 to 8"),
        ({"size": 4}, "a batch, must be (B, 3, 8, 8)"),
        ({"classes": "{}/names.txt"}, "must be 'ant', as in the calibration, got 'dog'"),
        ({"weights": "{}/other.pth"}, "the facts belong to another model"),
    ],
    ids=str,
)
def test_mistakes_are_sentences(desk, twoshift, tmp_path, others, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "names.txt").write_text("dog\nbee\ncat\n")
    if "weights" in others:
        torch.manual_seed(3)
        torch.save(make_net().state_dict(), tmp_path / "other.pth")
    given = {k: v.format(tmp_path) if isinstance(v, str) else v for k, v in others.items()}
    code, _, err = twoshift(*words(desk, **given))
    assert code == 2
    assert says in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("out*.csv"))
