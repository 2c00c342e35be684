from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from twoshift import LabelAware
from twoshift.errors import BatchError, DataCorrupt, MismatchError, SettingError, StorageError
from twoshift.predict import online, work
from twoshift.predict.build import make_ready
from twoshift.predict.inputs import open_gallery
from twoshift.predict.run import Options, predict
from twoshift.predict.summary import as_text
from twoshift.storage import only_one

SMALL = {"batch_size": 16, "part": 48}


def rows_in(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def by_hand(known, images: Path, batch_size: int = 16):
    """Class, probability and label estimate of every image, by the plainest loop."""
    from PIL import Image

    from twoshift import recommended

    live, found = recommended(known.net, known.facts), {}
    paths = sorted(p for p in images.rglob("*.png"))
    edges = [*range(0, len(paths), batch_size)]
    if len(paths) - edges[-1] < batch_size / 2:
        edges.pop()
    for start, stop in zip(edges, [*edges[1:], len(paths)], strict=True):
        batch = [p for p in paths[start:stop] if p.name != "0020.png"]
        x = torch.stack([torch.from_numpy(np.array(Image.open(p))) for p in batch])
        probs = live(x.permute(0, 3, 1, 2).float() / 255).softmax(1)
        for path, p in zip(batch, probs, strict=True):
            found[str(path)] = (int(p.argmax()), float(p.max()))
    return found


def test_the_table_is_what_a_loop_by_hand_finds(known, ready, images, tmp_path):
    out = tmp_path / "out.csv"
    summary = predict(ready, open_gallery(str(images)), Options(out, **SMALL))
    expected = by_hand(known, images)
    rows = rows_in(out)
    assert [row["path"] for row in rows] == sorted(map(str, images.rglob("*.png")))
    for row in rows:
        if row["path"] not in expected:
            assert "cannot decode" in row["error"]
            continue
        c, p = expected[row["path"]]
        assert row["class"] == ready.classes[c]
        assert float(row["probability"]) == pytest.approx(p, abs=1e-6)
    assert [int(row["batch"]) for row in rows] == [min(i // 16, 8) for i in range(150)]
    assert [int(row["state_version"]) for row in rows] == [min(i // 16, 8) + 1 for i in range(150)]
    assert (summary["images"], summary["errors"]) == (150, 1)
    changed = sum(row["class"] != row["unadapted"] for row in rows)
    assert summary["changed"] == changed
    counts = [sum(row["class"] == name for row in rows) for name in ready.classes]
    assert summary["counts"] == counts
    assert sum(summary["labels"]) == pytest.approx(1)
    assert not (tmp_path / "out.csv.parts").exists()
    assert f"{changed / 149:.1%} of predictions" in as_text(summary)


def test_the_same_command_has_nothing_left_to_do(ready, images, tmp_path, monkeypatch):
    gallery, options = open_gallery(str(images)), Options(tmp_path / "out.csv", **SMALL)
    first = predict(ready, gallery, options)
    monkeypatch.setattr(online.Online, "run", lambda *_: pytest.fail("it was done again"))
    assert json.dumps(predict(ready, gallery, options)) == json.dumps(first)


def test_other_settings_are_refused_until_told_to_overwrite(ready, images, tmp_path):
    gallery, out = open_gallery(str(images)), tmp_path / "out.csv"
    predict(ready, gallery, Options(out, **SMALL))
    before = out.read_bytes()
    with pytest.raises(StorageError, match=r"top was 1, is 2. Start anew: --overwrite"):
        predict(ready, gallery, Options(out, top=2, **SMALL))
    assert out.read_bytes() == before
    (images / "x" / "new.png").write_bytes((images / "x" / "0000.png").read_bytes())
    with pytest.raises(StorageError, match="other settings: images was"):
        predict(ready, open_gallery(str(images)), Options(out, **SMALL))
    predict(ready, gallery, Options(out, top=2, overwrite=True, **SMALL))
    assert "class_2" in rows_in(out)[0]


def test_a_mistake_before_the_first_part_costs_nothing(known, ready, images, tmp_path):
    gallery, out = open_gallery(str(images)), tmp_path / "out.csv"
    wrong = make_ready(known.net, known.facts, decoding={"size": 4, "frame": 4})
    with pytest.raises(BatchError, match=r"must be \(B, 3, 8, 8\)"):
        predict(wrong, gallery, Options(out, **SMALL))
    predict(ready, gallery, Options(out, **SMALL))
    assert len(rows_in(out)) == 150


def test_a_file_of_somebody_else_is_not_replaced(ready, images, tmp_path):
    out = tmp_path / "out.csv"
    out.write_text("mine")
    with pytest.raises(StorageError, match=r"out.csv exists. Choose another file"):
        predict(ready, open_gallery(str(images)), Options(out, **SMALL))
    assert out.read_text() == "mine"
    assert not (tmp_path / "out.csv.parts").exists()


def state_bytes(folder: Path) -> dict[str, bytes]:
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: raw for name, raw in files.items() if not name.endswith(".lock")}


class Killed(BaseException):
    """The process ends here."""


def writes(monkeypatch, at: int) -> list[str]:
    """Stop the process before its write number ``at``; returns the writes so far."""
    log: list[str] = []

    def counted(name, real):
        def write(*args, **kwargs):
            log.append(name)
            if len(log) == at:
                raise Killed
            return real(*args, **kwargs)

        return write

    for place in (work, online):
        monkeypatch.setattr(place, "write_json", counted("json", place.write_json))
    monkeypatch.setattr(work, "atomic_file", counted("file", work.atomic_file))
    monkeypatch.setattr(work, "join", counted("join", work.join))
    monkeypatch.setattr(work.Work, "remove", counted("remove", work.Work.remove))
    stream = online.LiveStream
    monkeypatch.setattr(stream, "save", counted("state", stream.save))
    return log


@pytest.mark.parametrize("group_by", [None, "folder"])
def test_a_run_that_is_killed_anywhere_goes_on_bit_for_bit(
    ready, images, tmp_path, monkeypatch, group_by
):
    gallery = open_gallery(str(images), group_by=group_by)
    settings = {"batch_size": 25, "part": 100 if group_by else 75}
    # a state to go on from, so that images that are counted twice would show
    predict(ready, gallery, Options(tmp_path / "0.csv", state=tmp_path / "start", **settings))
    shutil.copytree(tmp_path / "start", tmp_path / "whole")
    with monkeypatch.context() as patch:
        log = writes(patch, 0)
        whole = Options(tmp_path / "whole.csv", state=tmp_path / "whole", **settings)
        predict(ready, gallery, whole)
    for at in range(1, len(log) + 1):
        state, out = tmp_path / f"state{at}", tmp_path / f"{at}.csv"
        shutil.copytree(tmp_path / "start", state)
        options = Options(out, state=state, **settings)
        with monkeypatch.context() as patch:
            writes(patch, at)
            with pytest.raises(Killed):
                predict(ready, gallery, options)
        for stream in ready.live.streams:
            ready.live.drop(stream)  # as in a new process
        predict(ready, gallery, options)
        assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes(), log[:at]
        assert state_bytes(state) == state_bytes(tmp_path / "whole"), log[:at]
        predict(ready, gallery, options)  # nothing left to do
        assert state_bytes(state) == state_bytes(tmp_path / "whole")


def test_the_state_goes_on_over_several_runs(known, ready, images, tmp_path):
    """Half of the images, then the other half, are as all of them at once."""
    both = open_gallery(str(images), group_by="folder")
    assert both.streams[74:76] == ["x", "y"]
    state, options = tmp_path / "state", {"batch_size": 15}
    for half in "xy":
        gallery = open_gallery(str(images / half))
        predict(ready, gallery, Options(tmp_path / f"{half}.csv", state=state, **options))
    whole = open_gallery(str(images))
    predict(ready, whole, Options(tmp_path / "whole.csv", state=tmp_path / "other", **options))
    apart = rows_in(tmp_path / "x.csv") + rows_in(tmp_path / "y.csv")
    for a, b in zip(apart, rows_in(tmp_path / "whole.csv"), strict=True):
        for name in ("path", "class", "probability", "state_version"):
            assert a[name] == b[name]
    assert state_bytes(state) == state_bytes(tmp_path / "other")
    assert isinstance(LabelAware.load(state, known.net), LabelAware)


def test_groups_are_streams_of_their_own(ready, images, tmp_path):
    grouped = open_gallery(str(images), group_by="folder")
    options = Options(tmp_path / "out.csv", state=tmp_path / "state", **SMALL)
    predict(ready, grouped, options)
    rows = rows_in(options.out)
    for half in "xy":
        alone = Options(tmp_path / f"{half}.csv", **SMALL)
        predict(ready, open_gallery(str(images / half)), alone)
        own = [row for row in rows if row["stream"] == half]
        for a, b in zip(own, rows_in(alone.out), strict=True):
            assert {**a, "stream": ""} == {**b, "stream": ""}
    assert (tmp_path / "state" / "x" / "card.json").exists()
    assert not ready.live.streams  # all of them are closed


def test_a_state_that_changed_in_between_is_refused(ready, images, tmp_path, monkeypatch):
    gallery, state = open_gallery(str(images)), tmp_path / "state"
    options = Options(tmp_path / "out.csv", state=state, **SMALL)
    with monkeypatch.context() as patch:
        writes(patch, 6)
        with pytest.raises(Killed):
            predict(ready, gallery, options)
    ready.live.stream("other").save(state)
    ready.live.drop("other")
    with pytest.raises(StorageError, match="the state has changed since"):
        predict(ready, gallery, options)


def test_a_state_of_another_method_is_refused(known, ready, images, tmp_path):
    other = known.ready(method="tent")
    other.live.save(tmp_path / "state")
    options = Options(tmp_path / "out.csv", state=tmp_path / "state", **SMALL)
    with pytest.raises(MismatchError, match="method in"):
        predict(ready, open_gallery(str(images)), options)


def test_two_runs_into_one_output(ready, images, tmp_path):
    options = Options(tmp_path / "out.csv", state=tmp_path / "state", **SMALL)
    for path, says in (
        (tmp_path / "out.csv.parts" / ".lock", "another process writes"),
        (tmp_path / "state" / ".lock", "another process goes on with the state"),
    ):
        with only_one(path, "is here"), pytest.raises(StorageError, match=says):
            predict(ready, open_gallery(str(images)), options)
    predict(ready, open_gallery(str(images)), options)


def test_a_full_disk_loses_no_finished_part(ready, images, tmp_path, monkeypatch):
    gallery, options = open_gallery(str(images)), Options(tmp_path / "out.csv", **SMALL)
    real, parts = work.Sheet.write, []

    def full(sheet, path, suffix):
        parts.append(path)
        if len(parts) == 3:
            raise OSError(28, "No space left on device")
        real(sheet, path, suffix)

    monkeypatch.setattr(work.Sheet, "write", full)
    with pytest.raises(StorageError, match=r"No space left on device. Choose a folder"):
        predict(ready, gallery, options)
    left = sorted(p.name for p in (tmp_path / "out.csv.parts").glob("part-*.csv"))
    assert left == ["part-000000.csv", "part-000001.csv"]
    predict(ready, gallery, options)
    assert len(parts) == 4  # three parts, one of them twice
    assert len(rows_in(options.out)) == 150


def test_any_method(known, images, tmp_path):
    ready = known.ready(method="tent", method_settings={"lr": 1e-3}, adapter="logit")
    summary = predict(ready, open_gallery(str(images)), Options(tmp_path / "out.csv", **SMALL))
    assert summary["changed"] > 0
    plain = known.ready(method="source")
    summary = predict(plain, open_gallery(str(images)), Options(tmp_path / "plain.csv", **SMALL))
    assert summary["changed"] == 0
    assert summary["labels"] == [c / 149 for c in summary["counts"]]


def test_no_image_can_be_read(ready, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"")
    with pytest.raises(DataCorrupt, match=r"none of the 1 images of .* can be read; the first: "):
        predict(ready, open_gallery(str(tmp_path / "images")), Options(tmp_path / "out.csv"))
    assert not (tmp_path / "out.csv").exists()


def test_progress_tells_the_labels(ready, images, tmp_path):
    said = []
    gallery = open_gallery(str(images))
    predict(ready, gallery, Options(tmp_path / "out.csv", **SMALL), lambda *a: said.append(a))
    assert [done for done, _, _ in said][-1] == 150
    assert "ant " in said[-1][2]


def test_more_classes_than_there_are(ready, images, tmp_path):
    with pytest.raises(SettingError, match="--top, must be 1 to 3"):
        predict(ready, open_gallery(str(images)), Options(tmp_path / "out.csv", top=4))


def test_names_of_classes(known):
    with pytest.raises(MismatchError, match="name of class 1, must be 'bee'"):
        known.ready(classes=("ant", "dog", "cat"))
    with pytest.raises(MismatchError, match="must be 3 of them, got 2"):
        known.ready(classes=("ant", "bee"))


def test_parquet_and_csv_have_the_same_rows(ready, images, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    gallery = open_gallery(str(images))
    for name in ("out.csv", "out.parquet"):
        predict(ready, gallery, Options(tmp_path / name, top=2, probabilities=True, **SMALL))
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    for a, b in zip(rows_in(tmp_path / "out.csv"), table, strict=True):
        assert a.keys() == b.keys()
        for name, text in a.items():
            value = b[name]
            if isinstance(value, float):
                assert np.float32(text) == np.float32(value)
            else:
                assert text == ("" if value is None else str(value))
