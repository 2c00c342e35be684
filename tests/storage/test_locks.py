from __future__ import annotations

import shutil

import pytest

from twoshift.errors import StorageError
from twoshift.storage import only_one


def test_one_at_a_time(tmp_path):
    path = tmp_path / "new" / ".lock"
    with (
        only_one(path, "writes here"),
        pytest.raises(StorageError, match="another process writes here"),
        only_one(path, "writes here"),
    ):
        pass
    with only_one(path, "writes here"):
        pass


def test_the_folder_may_be_removed_meanwhile(tmp_path):
    path = tmp_path / "work" / ".lock"
    with only_one(path, "works"):
        shutil.rmtree(path.parent)
        with only_one(path, "works"):  # another folder, another lock
            pass
    with only_one(path, "works"):
        assert path.exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"), only_one(tmp_path / "file" / "x", "is"):
        pass
