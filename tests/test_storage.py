import errno
import json
import math
import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twoshift import storage
from twoshift.errors import CheckpointError, StorageError


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def save(folder, text="weights", **content):
    with storage.atomic_folder(folder) as temporary:
        (temporary / "a.txt").write_text(text)
        (temporary / "b.txt").write_text("more")
        storage.write_card(temporary, {"kind": "toy", **content})


class Killed(BaseException):
    """Not an Exception: nothing may swallow it, as nothing can catch a kill."""


# -- files ------------------------------------------------------------------------------------


def test_a_file_appears_whole_with_ordinary_permissions(tmp_path):
    path = tmp_path / "new" / "result.json"
    storage.write_json(path, {"a": [1, 2.5, None]})
    assert json.loads(path.read_text()) == {"a": [1, 2.5, None]}
    assert names(path.parent) == ["result.json"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("failure", [RuntimeError, Killed, KeyboardInterrupt])
def test_a_failed_write_leaves_the_old_file(tmp_path, failure):
    path = tmp_path / "result.json"
    path.write_text("old")

    def write():
        with storage.atomic_file(path) as temporary:
            temporary.write_text("half")
            raise failure

    with pytest.raises(failure):
        write()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["result.json"]


@pytest.mark.parametrize("value", [math.nan, math.inf, [1, -math.inf]])
def test_json_without_nan(tmp_path, value):
    with pytest.raises(ValueError, match="JSON"):
        storage.write_json(tmp_path / "x.json", {"v": value})
    assert names(tmp_path) == []


def test_below_a_regular_file_nothing_can_be_written(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("I am no folder")
    with pytest.raises(StorageError, match=r"file/x\.json"):
        storage.write_json(blocker / "x.json", {})
    with pytest.raises(StorageError, match="file/model"):
        save(blocker / "model")
    assert blocker.read_text() == "I am no folder"


def test_a_full_disk_is_named_and_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    storage.write_json(path, {"old": True})

    def full(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StorageError, match=r"No space left.*enough space; nothing was") as e:
        storage.write_json(path, {"old": False})
    assert isinstance(e.value.__cause__, OSError)
    assert json.loads(path.read_text()) == {"old": True}
    assert names(tmp_path) == ["x.json"]


def test_no_room_for_the_temporary_file_either(tmp_path, monkeypatch):
    def full(**kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkstemp", full)
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(StorageError, match="No space left"):
        storage.write_json(tmp_path / "x.json", {})
    with pytest.raises(StorageError, match="No space left"):
        save(tmp_path / "model")
    assert names(tmp_path) == []


# -- folders ----------------------------------------------------------------------------------


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    folder = tmp_path / "model"
    save(folder, "first")
    save(folder, "second")
    assert (folder / "a.txt").read_text() == "second"
    assert names(folder) == ["a.txt", "b.txt", "card.json"]
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("failure", [RuntimeError, Killed])
def test_a_failed_save_leaves_the_old_folder(tmp_path, failure):
    folder = tmp_path / "model"
    save(folder, "first")

    def write():
        with storage.atomic_folder(folder) as temporary:
            (temporary / "a.txt").write_text("half")
            raise failure

    with pytest.raises(failure):
        write()
    assert storage.read_card(folder, "toy")["folder"] == folder
    assert (folder / "a.txt").read_text() == "first"
    assert names(tmp_path) == ["model"]


def test_killed_between_the_renames_the_old_folder_is_found(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    save(folder, "first")
    rename, calls = Path.rename, []

    def killed_at_the_second(self, target):
        calls.append(self)
        if len(calls) == 2:
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed_at_the_second)
        with pytest.raises(Killed):
            save(folder, "second")
    assert not folder.exists()
    card = storage.read_card(folder, "toy")
    assert (card["folder"] / "a.txt").read_text() == "first"

    save(folder, "third")  # and the next save tidies up
    assert (folder / "a.txt").read_text() == "third"
    assert names(tmp_path) == ["model"]


def test_a_relative_path_and_a_trailing_slash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(Path("model/"))
    assert storage.read_card(Path("model"), "toy")["folder"] == tmp_path / "model"


# -- cards ------------------------------------------------------------------------------------


def test_a_card_comes_back(tmp_path):
    save(tmp_path / "m", classes=["a", "b"], lr=0.1)
    card = storage.read_card(tmp_path / "m", "toy")
    assert (card["classes"], card["lr"], card["kind"]) == (["a", "b"], 0.1, "toy")
    assert set(card["files"]) == {"a.txt", "b.txt"}


@pytest.mark.parametrize("length", [0, 3])
def test_a_truncated_file_is_refused(tmp_path, length):
    save(tmp_path / "m")
    os.truncate(tmp_path / "m" / "a.txt", length)
    with pytest.raises(CheckpointError, match=r"a\.txt is truncated or edited"):
        storage.read_card(tmp_path / "m", "toy")


def test_an_edited_file_of_the_same_length_is_refused(tmp_path):
    save(tmp_path / "m", "weights")
    (tmp_path / "m" / "a.txt").write_text("Weights")
    with pytest.raises(CheckpointError, match=r"a\.txt is truncated or edited"):
        storage.read_card(tmp_path / "m", "toy")


def test_a_missing_file_is_refused(tmp_path):
    save(tmp_path / "m")
    (tmp_path / "m" / "b.txt").unlink()
    with pytest.raises(CheckpointError, match=r"b\.txt is missing"):
        storage.read_card(tmp_path / "m", "toy")


def test_an_edited_card_is_refused(tmp_path):
    save(tmp_path / "m", lr=0.1)
    card = tmp_path / "m" / "card.json"
    card.write_text(card.read_text().replace("0.1", "0.2"))
    with pytest.raises(CheckpointError, match="was edited"):
        storage.read_card(tmp_path / "m", "toy")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", "{}", '{"checksum": "0"}', "\x00"])
def test_a_damaged_card_is_refused(tmp_path, text):
    save(tmp_path / "m")
    (tmp_path / "m" / "card.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"damaged|edited"):
        storage.read_card(tmp_path / "m", "toy")


def test_a_card_that_is_no_text_is_refused(tmp_path):
    save(tmp_path / "m")
    (tmp_path / "m" / "card.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="damaged"):
        storage.read_card(tmp_path / "m", "toy")


def test_no_card_and_another_kind(tmp_path):
    with pytest.raises(CheckpointError, match="no toy in"):
        storage.read_card(tmp_path / "nowhere", "toy")
    save(tmp_path / "m")
    with pytest.raises(CheckpointError, match="must be a saved source model, got toy"):
        storage.read_card(tmp_path / "m", "source model")


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_any_flipped_byte_of_a_saved_folder_is_noticed(tmp_path_factory, place, flip):
    folder = tmp_path_factory.mktemp("flip") / "m"
    save(folder, lr=0.1)
    files = sorted(folder.iterdir())
    content = b"".join(f.read_bytes() for f in files)
    place %= len(content)
    for file in files:
        size = file.stat().st_size
        if place < size:
            raw = bytearray(file.read_bytes())
            raw[place] ^= flip
            file.write_bytes(raw)
            break
        place -= size
    try:
        card = storage.read_card(folder, "toy")
    except CheckpointError:
        return
    # only white space between the card's values may change unnoticed
    assert file.name == "card.json"
    assert card["lr"] == 0.1


# -- tensors ----------------------------------------------------------------------------------


def test_tensors_come_back_bit_for_bit(tmp_path):
    tensors = {
        "float": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
        "nan": torch.tensor([math.nan, -0.0, math.inf]),
        "half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "int": torch.arange(3),
        "scalar": torch.tensor(0.1, dtype=torch.float64),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "empty": torch.empty(0, 3),
    }
    storage.write_tensors(tmp_path / "t.safetensors", tensors)
    back = storage.read_tensors(tmp_path / "t.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].nan_to_num(7), tensor.nan_to_num(7))
    assert storage.fingerprint(back) == storage.fingerprint(tensors)


def test_shared_memory_and_gradients_do_not_matter(tmp_path):
    weight = torch.nn.Parameter(torch.ones(4))
    storage.write_tensors(tmp_path / "t.safetensors", {"a": weight, "b": weight, "c": weight[:2]})
    back = storage.read_tensors(tmp_path / "t.safetensors")
    assert [len(back[k]) for k in "abc"] == [4, 4, 2]
    assert not back["a"].requires_grad


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\x80\x04K\x01.", b"\xff" * 64])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "t.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        storage.read_tensors(tmp_path / "t.safetensors")


def test_a_missing_tensor_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"t\.safetensors"):
        storage.read_tensors(tmp_path / "t.safetensors")


def test_the_fingerprint_sees_names_types_shapes_and_bits():
    base = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.zeros(2)}
    variants = [
        {"v": base["w"], "b": base["b"]},
        {"w": base["w"].reshape(4), "b": base["b"]},
        {"w": base["w"].t(), "b": base["b"]},
        {"w": base["w"].double(), "b": base["b"]},
        {"w": base["w"], "b": -base["b"]},
        {"w": torch.nextafter(base["w"], torch.tensor(9.0)), "b": base["b"]},
        {"w": base["w"]},
    ]
    prints = {storage.fingerprint(v) for v in [base, *variants]}
    assert len(prints) == len(variants) + 1
    assert storage.fingerprint(dict(reversed(base.items()))) == storage.fingerprint(base)
    assert len(storage.fingerprint({"empty": torch.empty(0), "scalar": torch.tensor(1)})) == 64


def test_a_saved_folder_keeps_other_peoples_files_and_drops_its_own_old_ones(tmp_path):
    folder = tmp_path / "saved"
    (folder / "notes").mkdir(parents=True)
    (folder / "notes" / "thesis.txt").write_text("years of work")
    (folder / ".hidden").write_text("too")
    (folder / "link").symlink_to("nowhere")
    with storage.atomic_folder(folder) as new:
        (new / "first.bin").write_bytes(b"1")
        storage.write_card(new, {"kind": "toy"})
    with storage.atomic_folder(folder) as new:
        (new / "second.bin").write_bytes(b"2")
        storage.write_card(new, {"kind": "toy"})
    assert storage.read_card(folder, "toy")["files"].keys() == {"second.bin"}
    assert {f.name for f in folder.iterdir()} == {
        "card.json",
        "second.bin",
        "notes",
        ".hidden",
        "link",
    }
    assert (folder / "notes" / "thesis.txt").read_text() == "years of work"
    with storage.atomic_folder(folder, keep_others=False):
        pass
    assert not list(folder.iterdir())


def test_other_peoples_files_are_copied_where_links_are_refused(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError("no hard links here")

    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "notes").write_text("mine")
    monkeypatch.setattr(os, "link", refuse)
    save(folder)
    assert (folder / "notes").read_text() == "mine"


def test_the_working_folder_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    with pytest.raises(StorageError, match="the current working folder"):
        save(tmp_path)
