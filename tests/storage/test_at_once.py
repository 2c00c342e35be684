"""Several processes and threads that save and read one folder, and some that are killed."""

import errno
import fcntl
import os
import shutil
import threading

import pytest

from tests.fuzz.kills import kill_while_saving
from tests.saved import names
from tests.storage.numbers import load, own, save
from twoshift.errors import StorageError
from twoshift.storage import _folders


def leftovers(folder):
    """What a save leaves that is killed just before, and one just after it swaps the card."""
    save(folder, 1)
    shutil.copy(folder / "card.json", folder / ".twoshift-aa.old.card")
    save_keeping(folder, 2)
    shutil.copy(folder / "card.json", folder / ".twoshift-bb.new.card")
    shutil.copy(folder / ".twoshift-aa.old.card", folder / "card.json")
    (folder / ".twoshift-cc.0.part").write_bytes(b"half")
    (folder / ".twoshift-dd.new.card").write_bytes(b'{"kind": "toy", "fil')
    return names(folder)


def save_keeping(folder, number):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    save(folder, number)
    for path, raw in before.items():
        if path.name != "card.json":
            path.write_bytes(raw)


def test_the_next_save_sweeps_what_killed_ones_left(tmp_path):
    assert len(leftovers(tmp_path)) == 9
    assert load(tmp_path) == 1
    save(tmp_path, 3)
    assert load(tmp_path) == 3
    assert names(tmp_path) == own(tmp_path)


def test_what_a_living_save_has_written_is_not_swept(tmp_path, monkeypatch):
    """The second waits until the first is done."""
    save(tmp_path, 1)
    real, reached, go_on = _folders.sync, threading.Event(), threading.Event()

    def slow(path):
        if threading.current_thread().name == "first":
            reached.set()
            assert go_on.wait(30)
        real(path)

    monkeypatch.setattr(_folders, "sync", slow)
    first = threading.Thread(target=save, args=(tmp_path, 2), name="first")
    second = threading.Thread(target=save, args=(tmp_path, 3), name="second")
    first.start()
    assert reached.wait(30)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert load(tmp_path) == 1
    go_on.set()
    first.join(30)
    second.join(30)
    assert load(tmp_path) == 3
    assert names(tmp_path) == own(tmp_path)


def test_many_threads_save_and_read(tmp_path):
    save(tmp_path, 0)
    failures = []

    def work(number):
        try:
            for _ in range(5):
                save(tmp_path, number)
                load(tmp_path)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert load(tmp_path) in range(6)
    assert names(tmp_path) == own(tmp_path)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    left = leftovers(tmp_path)

    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    save(tmp_path, 3)
    assert load(tmp_path) == 3
    # somebody else might be at work: only its own temporary files are gone
    assert {name for name in left if name.startswith(".")} <= set(names(tmp_path))
    monkeypatch.undo()
    save(tmp_path, 4)
    assert names(tmp_path) == own(tmp_path)


def test_a_lock_that_fails_is_an_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="Input/output error"):
        save(tmp_path)


def test_reading_beside_a_process_that_saves_all_the_time():
    happened = kill_while_saving(1, seed=0, longest=3)
    assert happened["read beside"] > 10
    assert happened["saved"] > 5


@pytest.mark.slow
def test_killed_while_saving():
    happened = kill_while_saving(30, seed=0)
    assert happened["kills"] == 30
    assert happened["left behind"] > 3  # the kills do come in the middle
    assert happened["old"] > 0 < happened["new"]


@pytest.mark.slow
def test_several_processes_that_save_to_one_folder_are_killed():
    assert kill_while_saving(10, seed=1, longest=0.5, savers=3)["left behind"] > 0
