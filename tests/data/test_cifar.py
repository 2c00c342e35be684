from __future__ import annotations

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from twoshift.data.base import datasets
from twoshift.data.cifar import CIFAR10, CIFAR100, Cifar, File, cifar10, cifar100, load_cifar
from twoshift.errors import DataCorrupt, DataMissing, SettingError

IMAGES = 6


def small_set(kind: Cifar, root: Path, layouts: str = "binary pickled") -> tuple[Cifar, dict]:
    """Write a set of a few random images in the official layouts; return its facts and records."""
    rng = np.random.default_rng(0)
    files, records = {}, {}
    for split, official in kind.files.items():
        files[split] = ()
        for file in official:
            labels = rng.integers(0, len(kind.classes), (IMAGES, len(kind.label_keys)))
            pixels = rng.integers(0, 256, (IMAGES, 3072))
            rows = np.hstack([labels, pixels]).astype(np.uint8)
            records.setdefault(split, []).append(rows)
            files[split] += (File(file.stem, IMAGES, hashlib.md5(rows.tobytes()).hexdigest()),)
            if "binary" in layouts:
                (root / kind.binary).mkdir(parents=True, exist_ok=True)
                (root / kind.binary / f"{file.stem}.bin").write_bytes(rows.tobytes())
            if "pickled" in layouts:
                (root / kind.pickled).mkdir(parents=True, exist_ok=True)
                content = {b"data": pixels.astype(np.uint8), b"filenames": [b"a.png"] * IMAGES}
                for key, column in zip(kind.label_keys, labels.T, strict=True):
                    content[key] = column.tolist()
                (root / kind.pickled / file.stem).write_bytes(pickle.dumps(content, protocol=2))
    return replace(kind, files=files), {k: np.concatenate(v) for k, v in records.items()}


def pixel_by_pixel(record: np.ndarray, n_labels: int) -> np.ndarray:
    image = np.zeros((32, 32, 3), np.uint8)
    for channel in range(3):
        for y in range(32):
            for x in range(32):
                image[y, x, channel] = record[n_labels + channel * 1024 + y * 32 + x]
    return image


@pytest.mark.parametrize("layout", ["binary", "pickled"])
@pytest.mark.parametrize("kind", [CIFAR10, CIFAR100], ids=lambda k: k.name)
@pytest.mark.parametrize("split", ["train", "test"])
def test_images_and_labels_of_every_layout(tmp_path, kind, split, layout):
    facts, records = small_set(kind, tmp_path, layout)
    data = load_cifar(facts, split, tmp_path)
    assert data.images.dtype == np.uint8
    assert data.labels.dtype == np.int64
    assert data.images.flags.c_contiguous
    assert len(data) == IMAGES * len(kind.files[split])
    assert (data.name, data.split, data.classes) == (kind.name, split, kind.classes)
    assert data.origin == getattr(kind, layout)
    for i in (0, len(data) - 1):
        expected = pixel_by_pixel(records[split][i], len(kind.label_keys))
        np.testing.assert_array_equal(data.images[i], expected)
    fine = records[split][:, len(kind.label_keys) - 1]
    np.testing.assert_array_equal(data.labels, fine)


@pytest.mark.parametrize("layout", ["binary", "pickled"])
def test_the_root_may_be_the_folder_of_the_files(tmp_path, layout):
    facts, _ = small_set(CIFAR100, tmp_path, layout)
    data = load_cifar(facts, "test", tmp_path / getattr(CIFAR100, layout))
    assert len(data) == IMAGES


def test_binary_is_preferred_and_pickled_replaces_a_missing_split(tmp_path):
    facts, _ = small_set(CIFAR10, tmp_path)
    assert load_cifar(facts, "train", tmp_path).origin == CIFAR10.binary
    (tmp_path / CIFAR10.binary / "data_batch_3.bin").unlink()
    assert load_cifar(facts, "train", tmp_path).origin == CIFAR10.pickled
    assert load_cifar(facts, "test", tmp_path).origin == CIFAR10.binary


def test_the_error_for_missing_data_names_the_command_and_the_folders(tmp_path):
    with pytest.raises(DataMissing, match="twoshift data get cifar10") as caught:
        load_cifar(CIFAR10, "test", tmp_path)
    for folder in (tmp_path / CIFAR10.binary, tmp_path / CIFAR10.pickled):
        assert str(folder) in str(caught.value)


def test_a_missing_file_of_several_is_named(tmp_path):
    facts, _ = small_set(CIFAR10, tmp_path, "binary")
    missing = tmp_path / CIFAR10.binary / "data_batch_2.bin"
    missing.unlink()
    with pytest.raises(DataMissing, match=r"data_batch_2\.bin") as caught:
        load_cifar(facts, "train", tmp_path)
    assert "data_batch_1.bin" not in str(caught.value)


@pytest.mark.parametrize("change", [-1, 1, -3073])
def test_a_wrong_size_names_the_file_and_both_sizes(tmp_path, change):
    facts, _ = small_set(CIFAR10, tmp_path, "binary")
    path = tmp_path / CIFAR10.binary / "test_batch.bin"
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"x")
    with pytest.raises(DataCorrupt, match="truncated") as caught:
        load_cifar(facts, "test", tmp_path)
    for fact in (path, IMAGES * 3073, IMAGES * 3073 + change):
        assert str(fact) in str(caught.value)


@pytest.mark.parametrize("position", [0, 1, 5000, -1])
def test_one_changed_byte_is_noticed_in_the_binary_layout(tmp_path, position):
    facts, _ = small_set(CIFAR10, tmp_path, "binary")
    path = tmp_path / CIFAR10.binary / "test_batch.bin"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataCorrupt, match="was changed"):
        load_cifar(facts, "test", tmp_path)


def edit_pickle(path: Path, **changes: object) -> None:
    content = pickle.loads(path.read_bytes())
    for key, value in changes.items():
        content[key.encode()] = value
    path.write_bytes(pickle.dumps({k: v for k, v in content.items() if v is not None}, protocol=2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fine_labels": [1] * IMAGES}, "was changed"),
        ({"coarse_labels": [1] * IMAGES}, "was changed"),
        ({"data": np.zeros((IMAGES, 3072), np.uint8)}, "was changed"),
        ({"data": np.zeros((IMAGES - 1, 3072), np.uint8)}, "something else|truncated"),
        ({"fine_labels": None}, "something else"),
        ({"fine_labels": [1]}, "something else"),
        ({"fine_labels": [300] * IMAGES}, "something else"),
        ({"fine_labels": [[1], [2, 3]]}, "something else"),
    ],
    ids=["fine", "coarse", "pixels", "fewer", "none", "short", "large", "ragged"],
)
def test_changed_content_is_noticed_in_the_pickled_layout(tmp_path, changes, message):
    facts, _ = small_set(CIFAR100, tmp_path, "pickled")
    edit_pickle(tmp_path / CIFAR100.pickled / "test", **changes)
    with pytest.raises(DataCorrupt, match=message):
        load_cifar(facts, "test", tmp_path)


def test_a_truncated_pickle_names_the_file_and_both_sizes(tmp_path):
    facts, _ = small_set(CIFAR10, tmp_path, "pickled")
    path = tmp_path / CIFAR10.pickled / "test_batch"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataCorrupt, match="truncated") as caught:
        load_cifar(facts, "test", tmp_path)
    for fact in (path, IMAGES * 3072, 1000):
        assert str(fact) in str(caught.value)


def test_a_pickle_of_something_else_is_refused(tmp_path):
    facts, _ = small_set(CIFAR10, tmp_path, "pickled")
    path = tmp_path / CIFAR10.pickled / "test_batch"
    path.write_bytes(pickle.dumps([0] * 20_000))
    with pytest.raises(DataCorrupt, match="something else"):
        load_cifar(facts, "test", tmp_path)


@pytest.mark.parametrize("load", [cifar10, cifar100])
def test_an_unknown_split_is_refused(tmp_path, load):
    with pytest.raises(SettingError, match="'train', 'test'"):
        load("val", tmp_path)


def test_the_class_names():
    assert (len(CIFAR10.classes), len(CIFAR100.classes)) == (10, 100)
    assert list(CIFAR100.classes) == sorted(set(CIFAR100.classes))


def test_both_are_registered():
    assert (datasets["cifar10"], datasets["cifar100"]) == (cifar10, cifar100)


@pytest.mark.parametrize("kind", [CIFAR10, CIFAR100], ids=lambda k: k.name)
def test_the_real_test_sets(shared_data, kind):
    binary = load_cifar(kind, "test", shared_data / kind.binary)
    pickled = load_cifar(kind, "test", shared_data / kind.pickled)
    np.testing.assert_array_equal(binary.images, pickled.images)
    np.testing.assert_array_equal(binary.labels, pickled.labels)
    assert binary.counts.tolist() == [10_000 // len(kind.classes)] * len(kind.classes)
    names = {"cifar10": (3, "cat"), "cifar100": (49, "mountain")}  # the first test image
    assert (binary.labels[0], kind.classes[binary.labels[0]]) == names[kind.name]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CIFAR10, CIFAR100], ids=lambda k: k.name)
def test_the_real_training_sets(shared_data, kind):
    binary = load_cifar(kind, "train", shared_data)
    assert binary.images.shape == (50_000, 32, 32, 3)
    assert binary.origin == kind.binary
    assert binary.counts.tolist() == [50_000 // len(kind.classes)] * len(kind.classes)
    pickled = load_cifar(kind, "train", shared_data / kind.pickled)
    np.testing.assert_array_equal(binary.images, pickled.images)
    np.testing.assert_array_equal(binary.labels, pickled.labels)
