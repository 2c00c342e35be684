from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoshift.data._lists import class_names, list_counts, read_list, reroot
from twoshift.errors import DataCorrupt, DataMissing

OFFICE_HOME = {"Clipart": (1017, 1017), "Product": (1984, 1985), "RealWorld": (1253, 1253)}
DOMAINNET = {  # the paper's test counts
    "real": (16141, 6943),
    "clipart": (3707, 1616),
    "painting": (6727, 2909),
    "sketch": (5537, 2399),
}


def write(folder, *paths):
    for path in paths:
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def write_list(tmp_path, text, name="x.txt"):
    (tmp_path / name).write_text(text)
    return read_list(tmp_path / name)


def test_lines_of_path_and_label(tmp_path):
    listing = write_list(tmp_path, "/a b/1.jpg 2\n\n  c/2.jpg   0 \r\n/d/3.jpg\t2")
    assert listing.paths == ("/a b/1.jpg", "c/2.jpg", "/d/3.jpg")
    assert listing.labels.tolist() == [2, 0, 2]
    assert listing.labels.dtype == np.int64
    assert list_counts(tmp_path / "x.txt").tolist() == [1, 0, 2]
    assert list_counts(tmp_path / "x.txt", classes=5).tolist() == [1, 0, 2, 0, 0]


@pytest.mark.parametrize(
    "line",
    ["a.jpg", "a.jpg cat", "a.jpg -1", "a.jpg 1.5", "7", "a 99999999", "a " + "1" * 5000],
)
def test_the_error_for_a_bad_line_names_its_number(tmp_path, line):
    with pytest.raises(DataCorrupt, match=r"line 2 of .*x\.txt") as caught:
        write_list(tmp_path, f"ok.jpg 0\n{line}\n")
    assert caught.value.got == line[:80]


def test_a_byte_order_mark_is_not_part_of_a_path(tmp_path):
    (tmp_path / "x.txt").write_bytes("cat/1.jpg 0\n".encode("utf-8-sig"))
    assert read_list(tmp_path / "x.txt").paths == ("cat/1.jpg",)


def test_missing_empty_and_binary_files_are_errors(tmp_path):
    with pytest.raises(DataMissing, match="does not exist"):
        read_list(tmp_path / "none.txt")
    with pytest.raises(DataCorrupt, match="empty"):
        write_list(tmp_path, "\n \n")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe 1\n")
    with pytest.raises(DataCorrupt, match="cannot be read"):
        read_list(tmp_path / "b.txt")


def test_absolute_paths_of_another_machine(tmp_path):
    write(tmp_path, "set/train/cat/1.jpg", "set/train/dog/1.jpg")
    paths = ["/data9/x/set/train/cat/1.jpg", "/data9/x/set/train/dog/1.jpg"]
    expected = [str(tmp_path / "set/train/cat/1.jpg"), str(tmp_path / "set/train/dog/1.jpg")]
    for base in (tmp_path, tmp_path / "set", tmp_path / "set" / "train"):
        assert reroot(paths, [tmp_path / "nowhere", base]) == (expected, [])


def test_valid_paths_are_kept(tmp_path):
    write(tmp_path, "a/1.jpg", "b/a/1.jpg")
    here = str(tmp_path / "a" / "1.jpg")
    assert reroot([here], [tmp_path / "b"]) == ([here], [])
    assert reroot(["a/1.jpg"], [tmp_path]) == ([here], [])


def test_the_longest_tail_wins(tmp_path):
    write(tmp_path, "train/cat/1.jpg", "cat/1.jpg")
    assert reroot(["/x/train/cat/1.jpg"], [tmp_path])[0] == [str(tmp_path / "train/cat/1.jpg")]


def test_the_longest_tail_wins_if_images_are_missing(tmp_path):
    write(tmp_path, "train/cat/1.jpg", "cat/1.jpg", "other/cat/1.jpg")
    paths = ["/x/train/cat/1.jpg", "/x/train/cat/2.jpg"]
    expected = [str(tmp_path / "train" / "cat" / f"{i}.jpg") for i in (1, 2)]
    assert reroot(paths, [tmp_path, tmp_path / "other"]) == (expected, expected[1:])


def test_all_paths_lose_the_same_number_of_components(tmp_path):
    write(tmp_path, "cat/1.jpg", "cat/3.jpg", "train/cat/9.jpg")
    paths_here, missing = reroot([f"/x/train/cat/{i}.jpg" for i in range(1, 4)], [tmp_path])
    assert paths_here == [str(tmp_path / "cat" / f"{i}.jpg") for i in range(1, 4)]
    assert missing == [paths_here[1]]


def test_without_any_image_the_paths_stay_as_listed(tmp_path):
    assert reroot(["/x/a.jpg"], [tmp_path]) == (["/x/a.jpg"], ["/x/a.jpg"])


def test_different_paths_stay_different(tmp_path):
    write(tmp_path, "cat/1.jpg")
    paths = ["a/cat/1.jpg", "b/cat/1.jpg"]
    assert reroot(paths, [tmp_path]) == (paths, paths)


def test_images_are_not_found_by_their_bare_names(tmp_path):
    write(tmp_path, "1.jpg", "2.jpg")
    paths = ["/x/cat/1.jpg", "/x/cat/2.jpg"]
    assert reroot(paths, [tmp_path])[1] == paths
    assert reroot(["1.jpg", "2.jpg"], [tmp_path])[1] == []


def test_an_image_may_be_listed_twice(tmp_path):
    write(tmp_path, "cat/1.jpg")
    paths_here, missing = reroot(["/x/cat/1.jpg"] * 2 + ["/x/cat/2.jpg"] * 2, [tmp_path])
    assert len(paths_here) == 4
    assert missing == [str(tmp_path / "cat" / "2.jpg")] * 2


def test_every_folder_is_listed_once_and_no_file_is_looked_up(tmp_path, monkeypatch):
    write(tmp_path, *(f"c{c}/{i}.jpg" for c in range(3) for i in range(50)))
    read: list[str] = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: read.append(str(folder)) or listdir(folder))
    monkeypatch.setattr(os, "stat", None)
    paths = [f"/x/y/c{c}/{i}.jpg" for c in range(3) for i in range(50)]
    assert reroot(paths, [tmp_path])[1] == []
    assert len(read) == len(set(read))


@given(
    files=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1),
    removed=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 4))),
    prefix=st.sampled_from(["/a/b", "a", "/", "/a/b/c/d"]),
)
def test_reroot_agrees_with_looking_up_every_file(tmp_path_factory, files, removed, prefix):
    root = tmp_path_factory.mktemp("r")
    write(root, *(f"set/c{c}/{i}.jpg" for c, i in files - removed))
    order = sorted(files)
    paths = [f"{prefix}/set/c{c}/{i}.jpg" for c, i in order]
    expected = [str(root / f"set/c{c}/{i}.jpg") for c, i in order]
    exists = [os.path.exists(path) for path in expected]
    paths_here, missing = reroot(paths, [root])
    assert paths_here == (expected if any(exists) else paths)
    assert len(missing) == exists.count(False)
    if any(exists):
        assert missing == [path for path, here in zip(expected, exists, strict=True) if not here]


FOLDERS = "/x/cat/1.jpg 0\n/x/dog/1.jpg 2\n"


@pytest.mark.parametrize(
    ("text", "category", "expected"),
    [
        (FOLDERS, None, ("cat", "1", "dog")),
        (FOLDERS, "cat\ncow\ndog\nelk\n", ("cat", "cow", "dog", "elk")),
        (FOLDERS, "dog 2\ncat 0\nreal cow 1\n", ("cat", "real cow", "dog")),
        (FOLDERS, "dog\ncow\ncat\n", ("cat", "1", "dog")),  # contradicts the folders
        (FOLDERS, "cow 0\ncow 1\ncow 2\n", ("cow 0", "cow 1", "cow 2")),
        (FOLDERS, "cow 0 0\ncow 1 1\ncow 2 2\n", ("cow 0", "cow 1", "cow 2")),
        (FOLDERS, f"cow 0\npig 1\nhen {'2' * 5000}\n", ("cow 0", "pig 1", f"hen {'2' * 5000}")),
        ("/x/001/1.jpg 0\n/x/002/1.jpg 1\n", "cat\ndog", ("cat", "dog")),
        ("1.jpg 0\n2.jpg 1\n", None, ("0", "1")),
        ("/x/1.jpg 0\n/x/2.jpg 1\n", None, ("0", "1")),
        ("/x/1.jpg 0\n/x/2.jpg 1\n", "cat\ndog\n", ("cat", "dog")),
        ("/x/a/1.jpg 0\n/x/b/2.jpg 0\n", None, ("0",)),
    ],
)
def test_names_of_classes(tmp_path, text, category, expected):
    if category:
        (tmp_path / "category.txt").write_text(category)
    assert class_names(write_list(tmp_path, text)) == expected


@pytest.mark.parametrize("domain", OFFICE_HOME)
def test_office_home_lists(shared_data, domain):
    lists = shared_data / "lists" / "office-home-rsut"
    source, target = (list_counts(lists / f"{domain}_{kind}.txt") for kind in ("RS", "UT"))
    assert (source.sum(), target.sum()) == OFFICE_HOME[domain]
    assert len(source) == len(target) == 65
    for counts in (source, target):
        assert 5 < counts.max() / counts.min() < 6
    assert source[64] == source.max() == target[0] == target.max()
    assert source[0] == source.min() == target[64] == target.min()
    # category.txt is in another order: the folders say what a label means
    names = class_names(read_list(lists / f"{domain}_UT.txt"))
    assert (names[0], names[64]) == ("Alarm_Clock", "Webcam")
    assert list(names) == sorted(names, key=str.lower)


@pytest.mark.parametrize("domain", DOMAINNET)
def test_domainnet_lists(shared_data, domain):
    lists = shared_data / "lists" / "domainnet-40"
    names = []
    for split, total in zip(("train", "test"), DOMAINNET[domain], strict=True):
        counts = list_counts(lists / f"{domain}_{split}_mini.txt")
        assert (counts.sum(), len(counts)) == (total, 40)
        assert counts.min() > 0
        names.append(class_names(read_list(lists / f"{domain}_{split}_mini.txt")))
    assert names[0] == names[1] == class_names(read_list(lists / "real_test_mini.txt"))
    assert names[0][39] == "donut"


def test_visda_lists(shared_data):
    lists = shared_data / "lists" / "visda-c-rsut"
    source, target = list_counts(lists / "train_RS.txt"), list_counts(lists / "validation_UT.txt")
    assert (source.sum(), target.sum()) == (36875, 13400)
    for counts in (source, target):
        assert counts.max() / counts.min() == pytest.approx(100, rel=0.01)
    assert (np.diff(source) < 0).all()
    assert (np.diff(target) > 0).all()
    names = class_names(read_list(lists / "train_RS.txt"))
    assert names == tuple((lists / "category.txt").read_text().split())


def test_imagenet_lists(shared_data):
    lists = shared_data / "lists" / "imagenet-lt"
    assert set(list_counts(lists / "ImageNet_LT_test.txt").tolist()) == {50}
    names = class_names(read_list(lists / "ImageNet_LT_test.txt"))
    assert (len(names), names[0], names[999]) == (1000, "n01440764", "n15075141")
    forward, backward = (
        list_counts(lists / f"ImageNet_LT_{x}50.txt") for x in ("forward", "backward")
    )
    assert forward.max() / forward.min() == backward.max() / backward.min() == 50
