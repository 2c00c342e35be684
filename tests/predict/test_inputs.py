from __future__ import annotations

import os
import sys
import types
from typing import ClassVar

import numpy as np
import pytest

from tests.data.trees import write_image
from twoshift.errors import DataCorrupt, DataMissing, MissingExtra, SettingError
from twoshift.predict.inputs import open_gallery
from twoshift.predict.plan import cut, parts_of
from twoshift.predict.reading import Decoding, read_batches


@pytest.fixture
def tree(tmp_path):
    for i, name in enumerate(["b/2.png", "b/1.PNG", "a.jpg", "c/d/3.webp"]):
        write_image(tmp_path / "tree" / name, i, 0)
        os.utime(tmp_path / "tree" / name, ns=(0, 10**9 * (10 - i)))
    (tmp_path / "tree" / "notes.txt").write_text("no image")
    (tmp_path / "tree" / ".hidden.png").write_text("no image")
    (tmp_path / "tree" / ".cache").mkdir()
    (tmp_path / "tree" / ".cache" / "x.png").write_text("no image")
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "tree" / "b")
    return tmp_path / "tree"


def names(gallery, folder):
    return [os.path.relpath(name, folder) for name in gallery.ids]


def test_a_tree_needs_no_class_folders(tree):
    gallery = open_gallery(str(tree))
    assert names(gallery, tree) == ["a.jpg", "b/1.PNG", "b/2.png", "c/d/3.webp"]
    assert gallery.streams == ["default"] * 4
    assert gallery.notes == (
        "1 files that are not images are left out",
        "1 links to folders are not followed",
    )
    assert gallery.identity() == open_gallery(f"folder:{tree}").identity()


def test_order_by_time(tree):
    gallery = open_gallery(str(tree), order="time")
    assert names(gallery, tree) == ["c/d/3.webp", "a.jpg", "b/1.PNG", "b/2.png"]
    assert gallery.identity() != open_gallery(str(tree)).identity()


def test_folders_are_streams(tree):
    gallery = open_gallery(str(tree), group_by="folder", order="time")
    assert gallery.streams == ["b", "b", "c/d", "default"]
    assert names(gallery, tree) == ["b/1.PNG", "b/2.png", "c/d/3.webp", "a.jpg"]


def test_a_list_of_paths(tree):
    lines = ["b/2.png", "", f"{tree}/a.jpg", "gone.png"]
    (tree / "list.txt").write_text("\n".join(lines))
    gallery = open_gallery(f"list:{tree / 'list.txt'}")
    assert gallery.ids == ["b/2.png", f"{tree}/a.jpg", "gone.png"]  # as given
    batch = cut(gallery, 8)
    (seen,) = read_batches(gallery, Decoding(8, 8), batch)
    assert seen.positions == [0, 1]
    assert seen.x.shape == (2, 3, 8, 8)
    assert "does not exist" in seen.errors[2]


def test_labels_in_a_list_are_not_part_of_the_path(tree):
    (tree / "list.txt").write_text("b/2.png 3\na.jpg 0\n")
    gallery = open_gallery(f"list:{tree / 'list.txt'}", group_by="folder")
    assert gallery.ids == ["b/2.png", "a.jpg"]
    assert gallery.streams == ["b", "default"]


@pytest.fixture
def arrays(tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (5, 8, 8, 3), np.uint8)
    camera = np.array(["q", "p", "q", "p", "p"])
    when = np.array([5.0, 4.0, 3.0, 2.0, 1.0])
    np.savez(tmp_path / "a.npz", images=images, camera=camera, when=when)
    return tmp_path / "a.npz", images


def test_arrays(arrays):
    file, images = arrays
    gallery = open_gallery(str(file), group_by="camera", order="when")
    assert gallery.streams == ["p", "p", "p", "q", "q"]
    assert gallery.ids == [f"a.npz:{i}" for i in (4, 3, 1, 2, 0)]
    (first, second) = read_batches(gallery, Decoding(4, 4), cut(gallery, 8))
    assert np.array_equal(first.x.mul(255).round().byte().permute(0, 2, 3, 1), images[[4, 3, 1]])
    assert len(second.x) == 2


def test_grey_images_of_colour_files_are_those_of_pillow(tmp_path):
    from PIL import Image

    write_image(tmp_path / "t" / "a.png", 0, 0, (8, 8))
    gallery = open_gallery(str(tmp_path / "t"))
    (seen,) = read_batches(gallery, Decoding(8, 8, channels=1), cut(gallery, 4))
    grey = np.asarray(Image.open(tmp_path / "t" / "a.png").convert("L"))
    assert np.array_equal(seen.x.mul(255).round().byte()[0, 0], grey)


@pytest.fixture
def shards(tmp_path, tree):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    encoded = [(tree / "b" / name).read_bytes() for name in ("1.PNG", "2.png")]
    rows = [encoded[i % 2] for i in range(150)]
    rows[40], rows[41] = b"nothing", None
    (tmp_path / "shards").mkdir()
    for k in range(3):
        part = range(50 * k, 50 * k + 50)
        columns = {"image": [rows[i] for i in part], "id": [f"n{i:03}" for i in part]}
        columns["cam"] = [i % 2 for i in part]
        file = tmp_path / "shards" / f"{k}.parquet"
        pq.write_table(pa.table(columns), file, row_group_size=20)
    return tmp_path / "shards"


def test_a_table_of_encoded_images(shards):
    gallery = open_gallery(str(shards))
    assert gallery.ids == [f"n{i:03}" for i in range(150)]
    seen = list(read_batches(gallery, Decoding(8, 8), cut(gallery, 64)))
    assert [len(s.positions) for s in seen] == [62, 86]
    assert "no image" in seen[0].errors[40]
    assert seen[0].errors[41] == "image n041"


def test_a_table_in_another_order(shards):
    straight = open_gallery(str(shards))
    grouped = open_gallery(f"parquet:{shards}", group_by="cam", order="id")
    assert grouped.streams == ["0"] * 75 + ["1"] * 75
    first, second = (
        {g.ids[s.batch.start]: s.x for s in read_batches(g, Decoding(8, 8), cut(g, 1))}
        for g in (straight, grouped)
    )
    assert first.keys() == second.keys()
    for name, x in first.items():
        assert (x is None) == (second[name] is None)
        assert x is None or (x == second[name]).all()


def test_a_table_of_paths(tmp_path, tree):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"path": ["b/2.png", "a.jpg"]}), tree / "t.parquet")
    gallery = open_gallery(str(tree / "t.parquet"))
    (seen,) = read_batches(gallery, Decoding(8, 8), cut(gallery, 4))
    assert gallery.ids == ["b/2.png", "a.jpg"]
    assert not seen.errors


def test_batches_and_parts_depend_on_positions_only(arrays):
    gallery = open_gallery(str(arrays[0]), group_by="camera")
    batches = cut(gallery, 2)
    assert [tuple(b) for b in batches] == [("p", 0, 0, 2), ("p", 1, 2, 3), ("q", 0, 3, 5)]
    assert [len(p) for p in parts_of(batches, 3)] == [2, 1]
    assert [batch for part in parts_of(batches, 1) for batch in part] == batches


@pytest.mark.parametrize(
    ("source", "options", "error", "says"),
    [
        ("{}/absent", {}, DataMissing, "does not exist"),
        ("{}/empty", {}, DataMissing, "no images in"),
        ("parquet:{}/empty", {}, DataMissing, "no Parquet file"),
        ("foldr:{}", {}, SettingError, "Did you mean 'folder'"),
        ("{}/list.txt", {}, SettingError, "list:"),
        ("list:{}/list.txt", {}, DataCorrupt, "is empty"),
        ("{}/bad.npz", {}, DataCorrupt, "array 'images'"),
        ("{}/tree", {"order": "tmie"}, SettingError, "Did you mean 'time'"),
        ("{}/tree", {"group_by": "camera"}, SettingError, "no column 'camera'"),
        ("{}/tree", {"image_column": "x"}, SettingError, "used with a table"),
        ("{}/a.npz", {"id_column": "x"}, SettingError, "no column 'x'"),
    ],
    ids=str,
)
def test_mistakes(tmp_path, tree, arrays, source, options, error, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.txt").write_text("\n")
    np.savez(tmp_path / "bad.npz", pictures=np.zeros(3))
    with pytest.raises(error, match=says):
        open_gallery(source.format(tmp_path), **options)


class FakeTable:
    """As much of a Hugging Face table as is used."""

    features: ClassVar = {"image": object(), "id": object()}
    column_names = ("image", "id")

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, name):
        return [row[name] for row in self.rows]

    def select(self, rows):
        return FakeTable([self.rows[row] for row in rows])


def test_a_data_set_of_hugging_face(tree, monkeypatch):
    encoded = (tree / "b" / "2.png").read_bytes()
    rows = [{"image": {"bytes": encoded, "path": None}, "id": name} for name in "cab"]
    library = types.ModuleType("datasets")
    library.Image = type("Image", (), {})
    library.load_dataset = lambda name, configuration: {"test": FakeTable(rows)}
    monkeypatch.setitem(sys.modules, "datasets", library)
    gallery = open_gallery("hf:some/images", order="name")
    assert gallery.ids == ["a", "b", "c"]
    (seen,) = read_batches(gallery, Decoding(8, 8), cut(gallery, 4))
    assert not seen.errors
    with pytest.raises(SettingError, match=r"no split 'train'. Choose one: --split test"):
        open_gallery("hf:some/images", split="train")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"twoshift\[hf\]"):
        open_gallery("hf:some/images")
