from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.trees import PACS, make_pacs_tree, write_image
from twoshift.data import load
from twoshift.data._lists import list_counts
from twoshift.data._rsut import rsut, write_rsut
from twoshift.data.long_tail import class_counts
from twoshift.errors import DataError, DataMissing


def labels_of(counts) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))


@given(
    sizes=st.lists(st.tuples(st.integers(20, 90), st.integers(20, 90)), min_size=2, max_size=7),
    ratio=st.floats(1.5, 15),
    profile=st.sampled_from(["exponential", "pareto", "step"]),
    order=st.sampled_from(["index", "size"]),
    seed=st.integers(0, 9),
)
def test_source_and_target_have_opposite_tails(sizes, ratio, profile, order, seed):
    source, target = labels_of([a for a, _ in sizes]), labels_of([b for _, b in sizes])
    rows = rsut(source, target, ratio, seed, profile, order)
    again = rsut(source, target, ratio, seed, profile, order)
    counts = []
    for labels, chosen, same in zip((source, target), rows, again, strict=True):
        assert chosen.tolist() == same.tolist()
        assert len(set(chosen.tolist())) == len(chosen)
        counts.append(np.bincount(labels[chosen], minlength=len(sizes)))
    head_to_tail = np.argsort(-counts[0], kind="stable")
    for class_sizes, ranked in ((counts[0], head_to_tail), (counts[1], np.argsort(-counts[1]))):
        falling = class_sizes[ranked]
        expected = class_counts(profile, falling[0], len(class_sizes), ratio)
        assert falling.tolist() == expected.tolist()
    # classes that are rarer in the source are more frequent in the target
    assert (np.diff(counts[0])[..., None] * np.diff(counts[1])[..., None] <= 0).all()


def test_the_seed_decides_which_images_and_not_how_many():
    source, target = labels_of([40, 50, 60]), labels_of([60, 50, 40])
    first, second = rsut(source, target, 4, seed=1), rsut(source, target, 4, seed=2)
    for labels, a, b in zip((source, target), first, second, strict=True):
        assert set(a.tolist()) != set(b.tolist())
        assert np.bincount(labels[a]).tolist() == np.bincount(labels[b]).tolist()


def test_by_size_keeps_more_of_an_unbalanced_pair():
    source, target = labels_of([20, 200, 60]), labels_of([300, 40, 100])
    by_index, by_size = (rsut(source, target, 5, order=order) for order in ("index", "size"))
    assert np.bincount(source[by_size[0]]).argmax() == 1
    assert np.bincount(target[by_size[1]]).argmax() == 0
    assert sum(map(len, by_size)) > 2 * sum(map(len, by_index))


def test_a_permutation_as_order():
    labels = labels_of([30, 30, 30])
    source, target = rsut(labels, labels, 9, order=[2, 0, 1])
    assert np.bincount(labels[source]).tolist() == [10, 3, 30]
    assert np.bincount(labels[target]).tolist() == [10, 30, 3]


def test_the_published_lists_of_visda_have_this_profile(shared_data):
    lists = shared_data / "lists" / "visda-c-rsut"
    for domain, largest in (("train", 12699), ("validation", 4615)):  # their means are fractions
        expected = class_counts("exponential", largest, 12, 100)
        source, target = (list_counts(lists / f"{domain}_{kind}.txt") for kind in ("RS", "UT"))
        assert abs(source - expected).max() <= 1
        assert target.tolist() == source[::-1].tolist()


def test_different_numbers_of_classes_are_refused():
    with pytest.raises(DataError, match="same classes"):
        rsut(labels_of([5, 5]), labels_of([5, 5, 5]), 2)


def test_written_lists_can_be_loaded(tmp_path):
    make_pacs_tree(tmp_path / "data")
    sizes = write_rsut(
        "pacs:photo", "pacs:sketch", tmp_path / "out", 2, tmp_path / "data", order="size"
    )
    assert [file.name for file in sizes] == ["pacs-photo_RS.txt", "pacs-sketch_UT.txt"]
    for (file, count), domain in zip(sizes.items(), ("photo", "sketch"), strict=True):
        data = load(f"list:{file}", "train", size=16, frame=16)
        assert len(data) == count
        assert data.classes == PACS
        for path, label in zip(data.images.paths, data.labels, strict=True):
            assert path.parent.name == PACS[label]
            assert path.parent.parent.name == domain
    first = (tmp_path / "out" / "pacs-photo_RS.txt").read_text()
    write_rsut(
        "pacs:photo", "pacs:sketch", tmp_path / "out", 2, tmp_path / "data", seed=1, order="size"
    )
    assert (tmp_path / "out" / "pacs-photo_RS.txt").read_text() != first


def test_source_and_target_must_be_different_images(tmp_path):
    make_pacs_tree(tmp_path)
    with pytest.raises(DataError, match="different images"):
        write_rsut("pacs:photo", "pacs:photo", tmp_path / "out", 2, tmp_path)


def test_the_same_images_behind_a_link_are_noticed(tmp_path):
    make_pacs_tree(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "pacs" / "photo")
    with pytest.raises(DataError, match="different images"):
        write_rsut("pacs:photo", f"folder:{tmp_path / 'link'}", tmp_path / "out", 2, tmp_path)


@pytest.fixture
def folders(tmp_path):
    """Two sets of images; their class names differ only by a number."""
    for domain in ("a", "b"):
        for label in range(3):
            for i in range(4):
                file = tmp_path / domain / f"digit {label}" / f"{i}.png"
                write_image(file, label, i, (8, 8))
    return tmp_path / "a", tmp_path / "b"


def draw(folders, out):
    return write_rsut(f"folder:{folders[0]}", f"folder:{folders[1]}", out, 2, out)


def test_names_that_end_in_a_number_stay_different(folders, tmp_path):
    for file in draw(folders, tmp_path / "out"):
        data = load(f"list:{file}", "train", size=8, frame=8)
        assert data.classes == ("digit 0", "digit 1", "digit 2")


def test_names_of_other_classes_are_not_overwritten(folders, tmp_path):
    (tmp_path / "out").mkdir()
    category = tmp_path / "out" / "category.txt"
    category.write_text("digit 0\ndigit 1\ndigit 2\n")  # the same names in another format
    draw(folders, tmp_path / "out")
    category.write_text("cat\ndog\nelk\n")
    with pytest.raises(DataError, match=r"category\.txt names other classes"):
        draw(folders, tmp_path / "out")
    assert category.read_text() == "cat\ndog\nelk\n"


@pytest.mark.parametrize("name", [b"\xff.png", b"two\nlines.png"])
def test_a_file_name_that_does_not_fit_into_a_list(folders, tmp_path, name):
    images = sorted((folders[1] / "digit 2").iterdir())
    images[0].rename(os.fsdecode(os.fsencode(images[0].parent) + b"/" + name))
    for image in images[1:]:
        image.unlink()
    with pytest.raises(DataError, match=r"(udcff|two.nlines)\.png'.*UTF-8"):
        write_rsut(f"folder:{folders[0]}", f"folder:{folders[1]}", tmp_path / "out", 1, tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_missing_set_is_an_error(tmp_path):
    with pytest.raises(DataMissing, match="pacs:photo"):
        write_rsut("pacs:photo", "pacs:sketch", tmp_path / "out", 2, tmp_path)
    assert not (tmp_path / "out").exists()
