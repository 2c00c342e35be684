from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.data.trees import write_image
from twoshift.data import load
from twoshift.data._inventory import take_inventory
from twoshift.errors import DataCorrupt, DataMissing

SMALL = {"size": 8, "frame": 10}


def fill(folder: Path, **counts: int) -> None:
    for label, (title, count) in enumerate(counts.items()):
        (folder / title).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            write_image(folder / title / f"{i}.png", label, i, (12, 12))


def test_a_folder_of_class_folders(tmp_path):
    fill(tmp_path, dog=2, cat=3)
    write_image(tmp_path / "cat" / "more" / "x.JPEG", 1, 9)
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "cat" / "._0.png").write_bytes(b"left by a Mac")
    (tmp_path / ".git").mkdir()
    for split in ("train", "test"):
        data = load(f"folder:{tmp_path}", split, **SMALL)
        assert data.classes == ("cat", "dog")
        assert data.labels.tolist() == [0, 0, 0, 0, 1, 1]
        assert [p.name for p in data.images.paths] == [
            "0.png",
            "1.png",
            "2.png",
            "x.JPEG",
            "0.png",
            "1.png",
        ]
        assert data.images[:].shape == (6, 8, 8, 3)


def test_a_path_is_relative_to_the_working_folder(tmp_path, monkeypatch):
    fill(tmp_path / "mine", cat=1, dog=1)
    monkeypatch.chdir(tmp_path)
    assert len(load("folder:mine", "train", tmp_path / "data", **SMALL)) == 2


@pytest.mark.parametrize("test", ["test", "val", "validation"])
def test_train_and_test_folders_share_their_classes(tmp_path, test):
    fill(tmp_path / "train", cat=2, dog=1, elk=1)
    fill(tmp_path / test, dog=2, cat=1)
    train, other = (load(f"folder:{tmp_path}", split, **SMALL) for split in ("train", "test"))
    assert train.classes == other.classes == ("cat", "dog", "elk")
    assert train.counts.tolist() == [2, 1, 1]
    assert other.counts.tolist() == [1, 2, 0]


def test_other_folders_beside_the_splits_are_not_classes(tmp_path):
    fill(tmp_path / "train", cat=2, dog=1)
    fill(tmp_path / "test", cat=1, dog=1)
    fill(tmp_path, annotations=1, unlabeled=0)
    for split, count in (("train", 3), ("test", 2)):
        data = load(f"folder:{tmp_path}", split, **SMALL)
        assert (data.classes, len(data)) == (("cat", "dog"), count)
        notes = take_inventory(f"folder:{tmp_path}", split, tmp_path).notes
        assert notes == ("folders beside the splits are left out: annotations, unlabeled",)


def test_a_class_may_be_called_train(tmp_path):
    fill(tmp_path, train=2, bus=1)
    assert load(f"folder:{tmp_path}", "test", **SMALL).classes == ("bus", "train")


def test_an_empty_class_keeps_its_number(tmp_path):
    fill(tmp_path, ant=1, bee=0, cat=2)
    assert load(f"folder:{tmp_path}", "train", **SMALL).counts.tolist() == [1, 0, 2]


def test_missing_and_empty_folders_are_errors(tmp_path):
    with pytest.raises(DataMissing, match=r"lacks class folders in .*nothing"):
        load(f"folder:{tmp_path / 'nothing'}", "train")
    fill(tmp_path / "a", cat=0)
    with pytest.raises(DataMissing, match="lacks images"):
        load(f"folder:{tmp_path / 'a'}", "train")
    fill(tmp_path / "b" / "train", cat=1)
    with pytest.raises(DataMissing, match="lacks a folder test"):
        load(f"folder:{tmp_path / 'b'}", "test")


def test_a_list_beside_its_images(tmp_path):
    fill(tmp_path / "pictures", cat=2, dog=1)
    (tmp_path / "mine.txt").write_text("pictures/cat/1.png 1\npictures/dog/0.png 0\n")
    data = load(f"list:{tmp_path / 'mine.txt'}", "train", **SMALL)
    assert data.labels.tolist() == [1, 0]
    assert data.classes == ("dog", "cat")
    assert data.images.paths == (tmp_path / "pictures/cat/1.png", tmp_path / "pictures/dog/0.png")


def test_a_list_of_another_machine_is_found_under_the_root(tmp_path):
    fill(tmp_path / "data" / "animals", cat=1, dog=1)
    (tmp_path / "mine.txt").write_text("/elsewhere/x/y/cat/0.png 0\n/elsewhere/x/y/dog/0.png 1\n")
    data = load(f"list:{tmp_path / 'mine.txt'}", "test", tmp_path / "data", **SMALL)
    assert data.images.paths[1] == tmp_path / "data" / "animals" / "dog" / "0.png"
    assert data.origin == "mine.txt, images in data/animals: 2 images"
    with pytest.raises(DataMissing, match=r"2 of 2 images, the first: /elsewhere/x/y/cat/0\.png"):
        load(f"list:{tmp_path / 'mine.txt'}", "test", tmp_path / "none", **SMALL)


def test_a_list_does_not_match_images_by_file_name_only(tmp_path):
    fill(tmp_path / "data", holidays=2)
    (tmp_path / "mine.txt").write_text("/elsewhere/x/cat/0.png 0\n/elsewhere/x/cat/1.png 0\n")
    with pytest.raises(DataMissing, match="2 of 2 images"):
        load(f"list:{tmp_path / 'mine.txt'}", "test", tmp_path / "data", **SMALL)


def test_a_list_of_relative_and_absolute_paths(tmp_path):
    fill(tmp_path, cat=1, dog=1)
    (tmp_path / "mine.txt").write_text(f"cat/0.png 0\n{tmp_path}/dog/0.png 1\n")
    data = load(f"list:{tmp_path / 'mine.txt'}", "test", tmp_path, **SMALL)
    assert data.classes == ("cat", "dog")


IMAGES = np.random.default_rng(0).integers(0, 256, (5, 6, 7, 3), np.uint8)
LABELS = np.array([2, 0, 0, 1, 2])


def save(tmp_path, **arrays) -> str:
    np.savez(tmp_path / "a.npz", **arrays)
    return f"arrays:{tmp_path / 'a.npz'}"


def test_arrays(tmp_path):
    data = load(save(tmp_path, images=IMAGES, labels=LABELS), "train")
    np.testing.assert_array_equal(data.images, IMAGES)
    assert data.labels.tolist() == LABELS.tolist()
    assert data.classes == ("0", "1", "2")
    grey = save(tmp_path, images=IMAGES[..., 0], labels=LABELS, classes=["a", "b", "c", "d"])
    data = load(grey, "test")
    assert data.images.shape == (5, 6, 7, 1)
    assert data.classes == ("a", "b", "c", "d")


def test_arrays_of_both_splits(tmp_path):
    both = {
        "train_images": IMAGES,
        "train_labels": LABELS,
        "test_images": IMAGES[:2],
        "test_labels": LABELS[:2],
    }
    name = save(tmp_path, **both)
    assert (len(load(name, "train")), len(load(name, "test"))) == (5, 2)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": IMAGES}, "no array 'labels'"),
        ({"pixels": IMAGES}, "no array 'images'"),
        ({"images": IMAGES / 255, "labels": LABELS}, "images of .* must be uint8"),
        ({"images": IMAGES, "labels": LABELS[:3]}, "labels of"),
        ({"images": IMAGES, "labels": LABELS - 1}, "labels of"),
        ({"images": IMAGES, "labels": LABELS / 2}, "labels of"),
        ({"images": IMAGES, "labels": LABELS + 10**6}, "labels of .* 0 to 99,999"),
        ({"images": IMAGES, "labels": LABELS, "classes": ["a", "b"]}, "at least 3 names"),
        ({"images": IMAGES, "labels": LABELS, "classes": "abc"}, "at least 3 names"),
        ({"images": np.array([None, {}]), "labels": LABELS}, "cannot be read"),  # a pickle
    ],
)
def test_bad_arrays_are_refused(tmp_path, arrays, message):
    with pytest.raises(DataCorrupt, match=message):
        load(save(tmp_path, **arrays), "train")


def test_every_flipped_byte_is_an_error_or_harmless(tmp_path):
    file = tmp_path / "a.npz"
    np.savez_compressed(file, images=np.zeros((3, 2, 2, 3), np.uint8), labels=np.arange(3))
    content = file.read_bytes()
    errors = 0
    for i, byte in enumerate(content):
        file.write_bytes(content[:i] + bytes([byte ^ 0x41]) + content[i + 1 :])
        try:
            data = load(f"arrays:{file}", "train")
        except DataCorrupt:
            errors += 1
        else:
            assert data.labels.tolist() == [0, 1, 2]
            assert not data.images[np.arange(3)].any()
    assert errors > len(content) / 4


def test_arrays_that_unpack_to_more_than_the_memory(tmp_path, monkeypatch):
    name = save(tmp_path, images=IMAGES, labels=LABELS, other=np.zeros(10_000))
    size = sum(x.nbytes for x in (IMAGES, LABELS)) + 2 * 128  # with their headers
    monkeypatch.setattr("twoshift.data.own.free_memory", lambda: size)
    assert len(load(name, "train")) == len(IMAGES)  # what nobody asks for is not unpacked
    monkeypatch.setattr("twoshift.data.own.free_memory", lambda: size - 1)
    with pytest.raises(DataCorrupt, match=f"unpacks to {size:,} bytes, {size - 1:,} are free"):
        load(name, "train")


def test_arrays_that_claim_more_than_there_is(tmp_path):
    header = io.BytesIO()
    shape = {"descr": "|u1", "fortran_order": False, "shape": (2**50,)}
    np.lib.format.write_array_header_1_0(header, shape)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("images.npy", header.getvalue())
        file.writestr("labels.npy", header.getvalue())
    with pytest.raises(DataCorrupt, match="cannot be read"):
        load(f"arrays:{tmp_path / 'a.npz'}", "train")


@pytest.mark.parametrize("kind", ["arrays", "list"])
def test_a_pipe_is_no_file(tmp_path, kind):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataCorrupt, match="cannot be read"):
        load(f"{kind}:{tmp_path / 'pipe'}", "train")


def test_links_that_lead_in_circles_are_left_out_and_told(tmp_path):
    fill(tmp_path / "mine", cat=2, dog=2)
    (tmp_path / "mine" / "cat" / "again").symlink_to(tmp_path / "mine")
    (tmp_path / "mine" / "elk").symlink_to("elk")
    inventory = take_inventory(f"folder:{tmp_path / 'mine'}", "test", tmp_path)
    assert len(inventory.paths) == 4
    assert inventory.notes == (
        "1 links to folders inside the class folders are not followed",
        "links that lead nowhere are left out: elk",
    )


def test_missing_and_damaged_files_are_errors(tmp_path):
    with pytest.raises(DataMissing, match="does not exist"):
        load(f"arrays:{tmp_path / 'b.npz'}", "train")
    (tmp_path / "c.npz").write_bytes(b"PK\x03\x04 no zip")
    with pytest.raises(DataCorrupt, match="cannot be read"):
        load(f"arrays:{tmp_path / 'c.npz'}", "train")
    np.save(tmp_path / "d.npy", IMAGES)
    with pytest.raises(DataCorrupt, match="cannot be read"):
        load(f"arrays:{tmp_path / 'd.npy'}", "train")
