from __future__ import annotations

import io
import os
import pickle
import struct
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from twoshift.data._unpickle import read_pickle
from twoshift.errors import DataCorrupt


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
    content = {b"data": np.arange(6, dtype=np.uint8).reshape(2, 3), "l": [1, (2, None)], "t": 1.5}
    back = read_pickle(save(tmp_path, pickle.dumps(content, protocol=protocol)))
    np.testing.assert_array_equal(back.pop(b"data"), content.pop(b"data"))
    assert back == content


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
