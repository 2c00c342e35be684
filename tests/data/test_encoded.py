"""Parquet and Hugging Face; tests that need their packages are skipped without them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.trees import write_image
from twoshift.data import load
from twoshift.data.encoded import _class_numbers
from twoshift.errors import DataCorrupt, DataMissing, MissingExtra

SMALL = {"size": 8, "frame": 8}
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), np.uint8)


def png(pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


ENCODED = [png(pixels) for pixels in PIXELS]


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("parquet:x", "pyarrow", "twoshift[parquet]"), ("hf:x", "datasets", "twoshift[hf]")],
)
def test_a_missing_package_is_reported_with_its_install_line(monkeypatch, name, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=package) as caught:
        load(name, "train")
    assert f"pip install '{extra}'" in str(caught.value)


@pytest.mark.parametrize("label", [-1, 100_000, True, None])
def test_labels_must_be_class_numbers(label):
    assert _class_numbers("x", [0, 99_999], None)[0].tolist() == [0, 99_999]
    with pytest.raises(DataCorrupt, match=r"labels of x, .*below 100,000"):
        _class_numbers("x", [0, label], None)


def test_what_unpacks_to_more_than_the_memory_is_refused(write, monkeypatch):
    """A dictionary makes a small file of any number of equal images."""
    name = write({"image": ENCODED[:1] * 5000, "label": [0] * 5000})
    assert Path(name.partition(":")[2]).stat().st_size < 20_000
    monkeypatch.setattr("twoshift.data.encoded.free_memory", lambda: 500_000)
    with pytest.raises(DataCorrupt, match="unpacks to more than the free memory"):
        load(name, "train", **SMALL)


@pytest.mark.parametrize("names", [3, {"a": 1}, [1, 2], json.loads("[" * 900 + "]" * 900)])
def test_odd_class_names_in_the_schema_are_not_used(write, names, tmp_path):
    data = load(write({"image": ENCODED, "label": [0, 1] * 3}, names), "train", tmp_path, **SMALL)
    assert data.classes == ("0", "1")


@pytest.fixture
def write(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")

    def write(columns, names=None, file="a.parquet"):
        table = pa.table(columns)
        if names is not None:
            features = {"label": {"_type": "ClassLabel", "names": names}}
            text = json.dumps({"info": {"features": features}})
            table = table.replace_schema_metadata({"huggingface": text})
        (tmp_path / file).parent.mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / file)
        return f"parquet:{tmp_path / file}"

    return write


@pytest.mark.parametrize("image", [ENCODED, [{"bytes": x, "path": "a.png"} for x in ENCODED]])
def test_parquet(write, tmp_path, image):
    labels = [1, 0, 0, 2, 1, 1]
    name = write({"image": image, "label": labels}, names=["ant", "bee", "cat", "dog"])
    data = load(name, "train", tmp_path / "data", **SMALL)
    np.testing.assert_array_equal(data.images[:], PIXELS)
    assert data.labels.tolist() == labels
    assert data.classes == ("ant", "bee", "cat", "dog")
    files = sorted((tmp_path / "data" / "cache" / "unpacked").rglob("*"))
    again = load(name, "test", tmp_path / "data", **SMALL)  # read from the cache
    assert again.images.paths == data.images.paths
    assert sorted((tmp_path / "data" / "cache" / "unpacked").rglob("*")) == files


def test_words_and_bare_numbers_as_labels(write, tmp_path):
    words = write({"img": ENCODED, "labels": ["b", "a", "b", "c", "a", "b"]})
    data = load(words, "train", tmp_path, **SMALL)
    assert data.labels.tolist() == [1, 0, 1, 2, 0, 1]
    assert data.classes == ("a", "b", "c")
    bare = write({"image": ENCODED, "label": [0, 1, 3, 1, 0, 0]})
    assert load(bare, "train", tmp_path, **SMALL).classes == ("0", "1", "2", "3")


def test_shards_of_splits(write, tmp_path):
    for file, rows in (("train-0", [0, 1]), ("train-1", [2, 3]), ("test-0", [4, 5])):
        columns = {"image": [ENCODED[i] for i in rows], "label": rows}
        write(columns, file=f"set/{file}.parquet")
    train, test = (
        load(f"parquet:{tmp_path / 'set'}", x, tmp_path, **SMALL) for x in ("train", "test")
    )
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 1, 2, 3], [4, 5])
    np.testing.assert_array_equal(test.images[:], PIXELS[4:])
    (tmp_path / "set" / "test-0.parquet").unlink()
    with pytest.raises(DataMissing, match="no Parquet file of test"):
        load(f"parquet:{tmp_path / 'set'}", "test", tmp_path)


def test_shards_that_do_not_fit_together(write, tmp_path):
    write({"image": ENCODED, "label": [0] * 6}, file="set/train-0.parquet")
    write({"image": ENCODED, "label": ["a"] * 6}, file="set/train-1.parquet")
    with pytest.raises(DataCorrupt, match="set is not a complete Parquet file"):
        load(f"parquet:{tmp_path / 'set'}", "train", tmp_path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"picture": ENCODED, "label": [0] * 6}, "has no column"),
        ({"image": ENCODED, "kind": [0] * 6}, "has no column"),
        ({"image": ENCODED, "label": [-1] * 6}, "labels of"),
        ({"image": ENCODED, "label": [10**6] * 6}, "below 100,000"),
        ({"image": ENCODED, "label": [0.5] * 6}, "labels of"),
        ({"image": ENCODED, "label": [0, 1, 2, None, 4, 5]}, "labels of"),
        ({"image": [1] * 6, "label": [0] * 6}, "bytes of image files"),
        ({"image": [*ENCODED[:5], None], "label": [0] * 6}, "bytes of image files"),
    ],
)
def test_bad_tables_are_refused(write, tmp_path, columns, message):
    with pytest.raises(DataCorrupt, match=message):
        load(write(columns), "train", tmp_path)


def test_more_labels_than_names(write, tmp_path):
    with pytest.raises(DataCorrupt, match="must be below 2"):
        load(write({"image": ENCODED, "label": [0, 1, 2, 0, 0, 0]}, ["a", "b"]), "train", tmp_path)


def test_a_file_that_is_not_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataCorrupt, match="not a complete Parquet file"):
        load(f"parquet:{tmp_path / 'a.parquet'}", "train", tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the library raises warnings of its own
def test_hugging_face(tmp_path, monkeypatch):
    for key in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(key, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    library = pytest.importorskip("datasets")
    for split, count in (("train", 3), ("test", 2)):
        for label, title in enumerate(("ant", "bee")):
            for i in range(count):
                write_image(tmp_path / "set" / split / title / f"{i}.png", label, i, (8, 8))
    data = load(f"hf:{tmp_path / 'set'}", "test", tmp_path, **SMALL)
    assert data.classes == ("ant", "bee")
    assert data.counts.tolist() == [2, 2]
    with Image.open(tmp_path / "set" / "test" / "bee" / "1.png") as image:
        np.testing.assert_array_equal(data.images[np.array([3])][0], np.asarray(image))

    dataset = library.Dataset.from_dict(
        {"image": [{"bytes": x, "path": None} for x in ENCODED], "label": [0, 1, 0, 1, 0, 1]},
        features=library.Features(
            image=library.Image(), label=library.ClassLabel(names=["ant", "bee"])
        ),
    )
    (tmp_path / "rows").mkdir()
    dataset.to_parquet(tmp_path / "rows" / "train-00000-of-00001.parquet")
    for name in (f"hf:{tmp_path / 'rows'}", f"parquet:{tmp_path / 'rows'}"):
        data = load(name, "train", tmp_path, **SMALL)
        np.testing.assert_array_equal(data.images[:], PIXELS)
        assert data.classes == ("ant", "bee")
        assert data.labels.tolist() == [0, 1] * 3
    with pytest.raises(DataMissing, match="has no split test"):
        load(f"hf:{tmp_path / 'rows'}", "test", tmp_path)
    with pytest.raises(DataMissing, match="cannot be loaded"):
        load(f"hf:{tmp_path / 'none'}", "test", tmp_path)
