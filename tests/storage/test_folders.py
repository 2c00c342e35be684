"""Saved folders: old or new at every moment, wherever they are, and nobody else's files."""

import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.saved import as_first_version, card_in, names, refit
from tests.storage.numbers import load, own, save
from twoshift import storage
from twoshift.errors import CheckpointError, StorageError
from twoshift.storage import _folders

# -- where ------------------------------------------------------------------------------------


def test_a_save_replaces_the_one_before(tmp_path):
    for number in (1, 2, 1, 1):
        save(tmp_path / "m", number)
        assert load(tmp_path / "m") == number
        assert names(tmp_path / "m") == own(tmp_path / "m")
    assert names(tmp_path) == ["m"]
    save(tmp_path / "m", 3, parts=["three"])
    assert [name.partition("-")[0] for name in names(tmp_path / "m")] == ["card.json", "three"]


def test_to_a_link_again_and_again(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "m").symlink_to("disk")
    for number in (1, 2, 3):
        save(tmp_path / "m", number)
        assert load(tmp_path / "m") == load(tmp_path / "disk") == number
    assert (tmp_path / "m").is_symlink()
    assert names(tmp_path) == ["disk", "m"]


def test_into_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        save(".", number)
    assert load(tmp_path) == 2
    save(Path("model/"))
    assert storage.read_folder("model", "toy").folder == tmp_path / "model"


@pytest.fixture
def volume(tmp_path):
    """A small file system of its own, as a container's volume is one."""
    folder = tmp_path / "volume"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_to_a_mount_point(volume):
    for number in (1, 2, 3):
        save(volume, number)
        assert load(volume) == number
    assert names(volume) == own(volume)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_are_those_of_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        save(tmp_path / "m")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o777 & ~mask
    for path in (tmp_path / "m").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_below_a_regular_file_nothing_can_be_saved(tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "m"):
        with pytest.raises(StorageError, match=f"cannot write {folder}"):
            save(folder)
    assert (tmp_path / "file").read_text() == "mine"


# -- whose ------------------------------------------------------------------------------------


def test_other_peoples_files_stay(tmp_path):
    folder = tmp_path / "m"
    (folder / "notes").mkdir(parents=True)
    (folder / "notes" / "thesis.txt").write_text("years of work")
    (folder / "link").symlink_to("nowhere")
    others = [".hidden", "one.safetensors", "one-0123456789ab.safetensors", ".twoshift-notes"]
    for name in others:
        (folder / name).write_text("mine")
    for number in (1, 2):
        save(folder, number)
    assert names(folder) == sorted([*own(folder), *others, "notes", "link"])
    assert all((folder / name).read_text() == "mine" for name in others)
    assert (folder / "notes" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("text", ["my own card", '{"name": "Ada"}', "[]"])
def test_somebody_elses_card_is_not_replaced(tmp_path, text):
    (tmp_path / "card.json").write_text(text)
    with pytest.raises(StorageError, match=r"card\.json is not a card of twoshift.*another folder"):
        save(tmp_path)
    assert names(tmp_path) == ["card.json"]
    assert (tmp_path / "card.json").read_text() == text


@pytest.mark.parametrize("damage", [lambda raw: raw[: len(raw) // 2], lambda raw: b""])
def test_a_damaged_card_is_replaced(tmp_path, damage):
    save(tmp_path, 1)
    (tmp_path / "card.json").write_bytes(damage((tmp_path / "card.json").read_bytes()))
    save(tmp_path, 2)
    assert load(tmp_path) == 2


def test_a_damaged_file_is_healed_by_saving_again(tmp_path):
    save(tmp_path)
    path = storage.saved_files(tmp_path)["one"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{path.name} is truncated or edited"):
        load(tmp_path)
    save(tmp_path)
    assert load(tmp_path) == 1


def test_a_card_cannot_have_other_files_removed(tmp_path):
    save(tmp_path)
    (tmp_path / "thesis.txt").write_text("mine")
    card = card_in(tmp_path)
    refit(tmp_path, {**card, "files": {**card["files"], "thesis.txt": "0" * 64}})
    save(tmp_path, 2)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


# -- 0.1.0 ------------------------------------------------------------------------------------


def test_the_layout_of_0_1_0_is_read_and_saved_over(tmp_path):
    save(tmp_path / "m", 1)
    as_first_version(tmp_path / "m")
    assert names(tmp_path / "m") == ["card.json", "one.safetensors", "two.safetensors"]
    assert load(tmp_path / "m") == 1
    save(tmp_path / "m", 2)
    assert load(tmp_path / "m") == 2
    assert names(tmp_path / "m") == own(tmp_path / "m")


def test_what_a_killed_save_of_0_1_0_moved_aside_is_found_and_put_back(tmp_path):
    save(tmp_path / "m", 1)
    (tmp_path / "m" / "notes").write_text("mine")
    (tmp_path / "m").rename(tmp_path / ".m.old")
    assert load(tmp_path / "m") == 1
    assert storage.read_folder(tmp_path / "m", "toy").folder == tmp_path / ".m.old"
    assert storage.is_saved(tmp_path / "m")
    save(tmp_path / "m", 2)
    assert names(tmp_path) == ["m"]
    assert names(tmp_path / "m") == sorted([*own(tmp_path / "m"), "notes"])


def test_a_folder_that_only_looks_moved_aside_is_left_alone(tmp_path):
    (tmp_path / ".m.old").mkdir()
    (tmp_path / ".m.old" / "notes").write_text("mine")
    assert not storage.is_saved(tmp_path / "m")
    save(tmp_path / "m")
    assert names(tmp_path / ".m.old") == ["notes"]


# -- reading ----------------------------------------------------------------------------------


def test_is_saved(tmp_path):
    folder = tmp_path / "m"
    assert not storage.is_saved(folder)
    folder.mkdir()
    assert not storage.is_saved(folder)
    (folder / "notes").touch()
    assert not storage.is_saved(folder)
    save(folder)
    assert storage.is_saved(folder)
    (folder / "card.json").unlink()  # damaged, not empty: who reads it gets an error
    assert storage.is_saved(folder)
    (folder / ".twoshift-0.new.card").touch()  # a first save was killed before it was done
    assert not storage.is_saved(folder)


def test_a_missing_file_is_named(tmp_path):
    save(tmp_path)
    path = storage.saved_files(tmp_path)["two"]
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path.name} is missing"):
        load(tmp_path)


@pytest.mark.parametrize("saves", [1, 2, 3, 10])
def test_a_folder_that_is_saved_while_it_is_read(tmp_path, monkeypatch, saves):
    """Between reading the card and opening the files, several times over."""
    save(tmp_path, 1)
    real, calls = _folders._contents, []

    def late(*arguments):
        calls.append(1)
        if len(calls) <= saves:
            save(tmp_path, len(calls) % 2 + 5)  # the same two states in turn
        return real(*arguments)

    monkeypatch.setattr(_folders, "_contents", late)
    assert load(tmp_path) == saves % 2 + 5


def test_a_file_that_was_opened_is_read_though_it_is_gone(tmp_path, monkeypatch):
    save(tmp_path, 1)
    real, calls = _folders._content, []

    def late(*arguments):
        calls.append(1)
        if len(calls) == 1:
            save(tmp_path, 2)
        return real(*arguments)

    monkeypatch.setattr(_folders, "_content", late)
    assert load(tmp_path) == 1
    assert load(tmp_path) == 2


@pytest.mark.parametrize("what", ["card.json", "one"])
@pytest.mark.parametrize(
    "kind", ["fifo", "folder", "link outside", "link inside", "link to nothing"]
)
def test_something_else_in_place_of_a_file(tmp_path, what, kind):
    folder = tmp_path / "m"
    save(folder)
    path = {**storage.saved_files(folder), "card.json": folder / "card.json"}[what]
    outside = Path(shutil.copy(path, tmp_path / "outside"))
    inside = Path(shutil.copy(path, folder / "inside"))
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"outside": outside, "inside": inside}.get(kind.split()[1], "nowhere"))
    if kind == "link inside":
        assert load(folder) == 1
        return
    with pytest.raises(CheckpointError, match=r"must be a (regular )?file|is missing"):
        load(folder)


AS_NOBODY = """
import os, sys
import torch
from twoshift import storage
from twoshift.errors import StorageError
os.setuid(65534)
for act in (
    lambda: storage.read_folder(sys.argv[1], "toy"),
    lambda: storage.is_saved(sys.argv[1] + "/m"),
    lambda: storage.save_folder(sys.argv[1], "toy", {}, {"one": {"x": torch.ones(1)}}),
):
    try:
        act()
    except StorageError as e:
        print(e)
"""


def in_python(code, folder):
    """What a process of its own prints, which is given a folder."""
    result = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    return result.stdout


def test_a_folder_without_permission(tmp_path):
    if os.getuid() != 0:
        pytest.skip("needs the right to become somebody else")
    save(tmp_path)
    tmp_path.chmod(0o700)
    printed = in_python(AS_NOBODY, tmp_path)
    read, saved, wrote = printed.splitlines()
    assert read.startswith(f"cannot read {tmp_path}: Permission denied. Check the path")
    assert saved.startswith(f"cannot read {tmp_path}/m: Permission denied. Check the path")
    assert wrote.startswith(f"cannot write {tmp_path}: Permission denied. Choose a folder")


# -- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False])
def test_a_full_disk(volume, before):
    if before:
        save(volume, 1)
    left = names(volume)
    large = {"one": {"x": torch.zeros(1000)}, "two": {"x": torch.zeros(100_000)}}
    with pytest.raises(StorageError, match=f"cannot write {volume}: No space left.*enough space"):
        storage.save_folder(volume, "toy", {}, large)
    assert names(volume) == left
    if before:
        assert load(volume) == 1
    save(volume, 2)
    assert load(volume) == 2


TOO_LARGE = """
import resource, sys
import torch
from twoshift import storage
from twoshift.errors import StorageError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    storage.save_folder(sys.argv[1], "toy", {}, {"one": {"x": torch.zeros(50_000)}})
except StorageError as e:
    print(e)
"""


def test_a_quota(tmp_path):
    save(tmp_path)
    before = names(tmp_path)
    printed = in_python(TOO_LARGE, tmp_path)
    assert printed.startswith(f"cannot write {tmp_path}: File too large. Choose a folder")
    assert names(tmp_path) == before
    assert load(tmp_path) == 1


class Killed(BaseException):
    """Not an Exception: nothing may swallow it, as nothing can catch a kill."""


STEPS = [(os, "fsync"), (os, "replace"), (Path, "replace"), (_folders, "to_bytes"), (os, "open")]


@pytest.mark.parametrize("failure", [OSError(errno.EIO, "Input/output error"), Killed()])
@pytest.mark.parametrize("call", range(1, 8))
@pytest.mark.parametrize(("owner", "name"), STEPS, ids=lambda x: x if isinstance(x, str) else "")
def test_whatever_fails_at_whatever_step(tmp_path, monkeypatch, owner, name, call, failure):
    save(tmp_path, 1)
    real, calls = getattr(owner, name), []

    def fail(*arguments, **settings):
        calls.append(1)
        if len(calls) == call:
            raise failure
        return real(*arguments, **settings)

    monkeypatch.setattr(owner, name, fail)
    expected = 1
    try:
        save(tmp_path, 2)
        expected = 2
    except (StorageError, Killed) as e:
        if "cannot sync" in str(e) or (name, call) == ("fsync", 5):
            expected = 2  # the last step: the new card is there, if the machine stays up
    monkeypatch.undo()
    assert load(tmp_path) == expected
    save(tmp_path, 3)
    assert load(tmp_path) == 3
    assert names(tmp_path) == own(tmp_path)


def test_files_and_folder_are_on_the_disk_before_the_card_is_swapped(tmp_path, monkeypatch):
    save(tmp_path, 1)
    events, fsync, replace = [], os.fsync, Path.replace

    def spied_fsync(descriptor):
        events.append(("sync", "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"))
        fsync(descriptor)

    def spied_replace(self, target):
        events.append(("rename", "card" if target.name == "card.json" else "file"))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", spied_fsync)
    monkeypatch.setattr(Path, "replace", spied_replace)
    save(tmp_path, 2)
    files = [("sync", "file")] * 3 + [("rename", "file")] * 2  # two files and the card
    assert events == [*files, ("sync", "folder"), ("rename", "card"), ("sync", "folder")]
