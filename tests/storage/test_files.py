"""Files that appear whole or not at all."""

import errno
import json
import math
import os
import stat
from pathlib import Path

import pytest

from tests.saved import names
from twoshift import storage
from twoshift.errors import CheckpointError, StorageError
from twoshift.storage import _files


class Killed(BaseException):
    """Not an Exception: nothing may swallow it, as nothing can catch a kill."""


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_file_appears_whole_with_the_permissions_of_the_umask(tmp_path, umask):
    path = tmp_path / "new" / "result.json"
    storage.write_json(path, {"a": [1, 2.5, None]})
    assert json.loads(path.read_text()) == {"a": [1, 2.5, None]}
    assert names(path.parent) == ["result.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


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


@pytest.mark.parametrize(
    ("what", "cure"), [("cannot read", "permissions"), ("cannot write", "spa")]
)
def test_the_cure_is_that_of_what_failed(what, cure):
    with (
        pytest.raises(StorageError, match=rf"{what} /x/y: .*\. .*{cure}"),
        storage.storage_errors(what, Path("/x/y")),
    ):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_folder_is_replaced_as_a_whole(tmp_path, umask):
    folder = tmp_path / "data"
    for text in ("first", "second"):
        with storage.atomic_folder(folder) as fresh:
            (fresh / text).write_text(text)
    assert names(folder) == ["second"]
    assert names(tmp_path) == ["data"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~umask


@pytest.mark.parametrize("failure", [RuntimeError, Killed])
def test_a_failed_block_leaves_the_old_folder(tmp_path, failure):
    folder = tmp_path / "data"
    with storage.atomic_folder(folder) as fresh:
        (fresh / "old").touch()

    def fill():
        with storage.atomic_folder(folder) as fresh:
            (fresh / "new").touch()
            raise failure

    with pytest.raises(failure):
        fill()
    assert names(folder) == ["old"]
    assert names(tmp_path) == ["data"]


def test_the_working_folder_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    with (
        pytest.raises(StorageError, match="the current working folder"),
        storage.atomic_folder(tmp_path),
    ):
        pass


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path, kind):
    path = Path("/dev/zero") if kind == "device" else tmp_path / "x"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(CheckpointError, match=f"(?i)must be a regular file, got a {kind}"):
        _files.open_regular(path)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_a_file_system_that_cannot_sync_folders_is_no_obstacle(tmp_path, monkeypatch, number):
    def refuse(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    storage.write_json(tmp_path / "x.json", {})
    assert names(tmp_path) == ["x.json"]


def test_a_disk_that_fails_to_sync_is_an_error(tmp_path, monkeypatch):
    def refuse(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match="Input/output error"):
        storage.write_json(tmp_path / "x.json", {})
    assert names(tmp_path) == []
