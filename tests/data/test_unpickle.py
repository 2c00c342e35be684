from __future__ import annotations

import io
import os
import pickle
import random
import struct
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz.pickles import ATTACKS, bad_pickles, good_pickle
from twoshift.data import _unpickle
from twoshift.data._unpickle import read_pickle
from twoshift.errors import DataCorrupt, DataMissing


def save(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "batch"
    path.write_bytes(content)
    return path


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A pickle as Python 2 and numpy 1 wrote it: byte strings, numpy.core, integer booleans."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    rows, columns = pixels.shape
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
        b"(K\x01(" + b"".join(b"M" + struct.pack("<H", n) for n in (rows, columns)) + b"t"
        b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR"
        b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbI00\n"
        b"T" + struct.pack("<i", pixels.size) + pixels.tobytes() + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([n]) for n in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def test_reads_what_python_2_wrote(tmp_path):
    pixels = np.arange(600, dtype=np.uint8).reshape(2, 300)
    content = read_pickle(save(tmp_path, python2_pickle(pixels, [7, 3])))
    assert set(content) == {b"data", b"labels"}
    np.testing.assert_array_equal(content[b"data"], pixels)
    assert content[b"data"].dtype == np.uint8
    assert content[b"labels"] == [7, 3]


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_reads_arrays_and_plain_containers(tmp_path, protocol):
    content = {b"data": np.arange(6, dtype=np.uint8).reshape(2, 3), "l": [1, None, "x"], "t": 1.5}
    back = read_pickle(save(tmp_path, pickle.dumps(content, protocol=protocol)))
    np.testing.assert_array_equal(back.pop(b"data"), content.pop(b"data"))
    assert back == content


@pytest.mark.parametrize("code", ["u1", "i1", "<i4", "<i8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_integers_in_both_orders(tmp_path, code, order):
    array = np.arange(-12, 12).astype(code).reshape(2, 3, 4).copy(order)
    back = read_pickle(save(tmp_path, pickle.dumps({"x": array, "same": [3]}, protocol=2)))["x"]
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype


def test_a_value_that_is_used_twice(tmp_path):
    array, labels = np.arange(4, dtype=np.uint8), [1, 2]
    content = {"a": array, "b": array, "c": labels, "d": labels}
    back = read_pickle(save(tmp_path, pickle.dumps(content, protocol=4)))
    np.testing.assert_array_equal(back["b"], array)
    assert back["d"] == labels


HARMLESS = {
    "frame of a giant length",
    "memo with a giant index",
    "memo with a negative index",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused(tmp_path, name):
    path = save(tmp_path, ATTACKS[name])
    if name in HARMLESS:
        assert isinstance(read_pickle(path), dict)
        return
    with pytest.raises(DataCorrupt) as caught:
        read_pickle(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_numpy_and_python_unpickle_nothing(tmp_path, monkeypatch):
    def never(*arguments, **settings):
        raise AssertionError("unpickled")

    content = pickle.dumps({"x": np.arange(3, dtype=np.uint8)}, protocol=2)
    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    assert read_pickle(save(tmp_path, content))["x"].tolist() == [0, 1, 2]
    assert not any(module is pickle for module in vars(_unpickle).values())


def test_mutated_pickles_never_do_more_than_raise(tmp_path):
    rng = random.Random(0)
    for _ in range(500):
        path = save(tmp_path, bad_pickles(rng))
        try:
            content = read_pickle(path)
        except DataCorrupt:
            continue
        for value in content.values():
            assert isinstance(value, np.ndarray | list | int | float | str | bytes | None)
            assert not isinstance(value, np.ndarray) or value.dtype.kind in "iu"


def test_good_pickles_of_the_fuzz_suite_are_read(tmp_path):
    rng = random.Random(0)
    for _ in range(50):
        content = good_pickle(rng)
        back, expected = read_pickle(save(tmp_path, content)), pickle.loads(content)
        np.testing.assert_array_equal(back[b"data"], expected[b"data"])
        assert back[b"labels"] == expected[b"labels"]
        assert back[b"filenames"] == expected[b"filenames"]


@pytest.mark.parametrize("name", ["object dtype as labels", "deep tuple as a key"])
def test_the_command_ends_with_a_message(tmp_path, name):
    """Before, it ended with signal 11: exit code 139."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    attack, size = ATTACKS[name], 10_000 * 3072
    padding = b"B" + struct.pack("<I", size) + bytes(size) + b"0"  # a value that is dropped again
    (folder / "test_batch").write_bytes(attack[:2] + padding + attack[2:])
    command = [sys.executable, "-m", "twoshift.cli", "data", "check", "cifar10", "--split", "test"]
    done = subprocess.run(
        [*command, "--data", tmp_path], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 1
    assert "test_batch is a pickle of something else" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_file_of_more_than_any_official_one(tmp_path, monkeypatch):
    monkeypatch.setattr(_unpickle, "MOST_BYTES", 10)
    with pytest.raises(DataCorrupt, match="more than 10 bytes"):
        read_pickle(save(tmp_path, bytes(11)))
    with pytest.raises(DataMissing):
        read_pickle(tmp_path / "none")


class Malicious:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_does_not_run(tmp_path, protocol):
    witness = tmp_path / "it ran"
    attack = pickle.dumps({b"data": Malicious(os.system, f"touch '{witness}'")}, protocol=protocol)
    path = save(tmp_path, attack)
    with pytest.raises(DataCorrupt, match=r"(posix|nt)\.system") as caught:
        read_pickle(path)
    assert str(path) in str(caught.value)
    assert not witness.exists()
    pickle.loads(attack)  # the attack does work
    assert witness.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Malicious(eval, "1 + 1"), r"builtins\.eval|__builtin__\.eval"),
        (OrderedDict(a=1), r"collections\.OrderedDict"),
        (np.load, r"numpy\.load"),
        (getattr, r"getattr"),
    ],
    ids=["eval", "OrderedDict", "numpy.load", "getattr"],
)
def test_everything_but_arrays_is_refused(tmp_path, value, message):
    with pytest.raises(DataCorrupt, match=message):
        read_pickle(save(tmp_path, pickle.dumps(value, protocol=2)))


def test_dotted_names_do_not_slip_through(tmp_path):
    attack = b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93."
    with pytest.raises(DataCorrupt, match=r"numpy\.ndarray\.tofile"):
        read_pickle(save(tmp_path, attack))


def test_other_encodings_are_refused(tmp_path):
    attack = b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86R."
    with pytest.raises(DataCorrupt, match="hex"):
        read_pickle(save(tmp_path, attack))


def test_persistent_ids_are_refused(tmp_path):
    class Writer(pickle.Pickler):
        def persistent_id(self, obj):
            return "key" if obj == "x" else None

    buffer = io.BytesIO()
    Writer(buffer).dump(["x"])
    with pytest.raises(DataCorrupt, match="persistent"):
        read_pickle(save(tmp_path, buffer.getvalue()))


@pytest.mark.parametrize("length", [0, 1, 10, 50, -1])
def test_a_truncated_pickle_is_an_error(tmp_path, length):
    content = pickle.dumps({b"data": np.zeros(99, np.uint8), b"labels": [1]}, protocol=2)
    path = save(tmp_path, content[:length])
    with pytest.raises(DataCorrupt, match="truncated or not a pickle"):
        read_pickle(path)


def test_garbage_is_an_error(tmp_path):
    with pytest.raises(DataCorrupt, match="truncated or not a pickle"):
        read_pickle(save(tmp_path, b"<html>not found</html>"))
