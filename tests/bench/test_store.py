from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.stored import MODEL, make_result, without_trace
from twoshift.bench import store as store_module
from twoshift.bench.cell import Model
from twoshift.bench.store import Store
from twoshift.errors import CheckpointError, InputError, MismatchError, StorageError


def change(path: Path, sql: str, *values: object) -> None:
    """What an editor, a bug or another tool may do to the file."""
    with closing(sqlite3.connect(path)) as db, db:
        assert db.execute(sql, values).rowcount != 0


# -- keeping ----------------------------------------------------------------------------------


def test_a_result_comes_back_whole(store, path):
    result = make_result(adapter="trained")
    store.put(result)
    store.close()
    with Store(path, create=False) as again:
        assert again.get(result.key) == result
        assert result.key in again
        assert again.keys() == {result.key}
        assert list(again.results()) == [without_trace(result)]
        assert list(again.results(trace=True)) == [result]
        assert next(again.results()).cell.key == result.key


def test_what_is_not_there(store):
    assert store.get("0" * 32) is None
    assert "0" * 32 not in store
    assert (len(store), store.keys(), list(store.results()), store.damaged()) == (0, set(), [], [])
    assert store.failures() == []
    assert store.seconds() == {}


def test_the_same_key_replaces(store):
    store.put(make_result(accuracy=0.1))
    store.put(make_result(accuracy=0.2))
    (result,) = store.results()
    assert result.metrics["accuracy"] == 0.2
    assert len(store) == 1


def test_a_result_without_a_trace(store):
    result = without_trace(make_result())
    store.put(result)
    assert store.get(result.key) == result


def test_pages_of_results_are_all_read_once(store, monkeypatch):
    monkeypatch.setattr(store_module, "PAGE", 3)
    made = [make_result(seed) for seed in range(10)]
    for result in made:
        store.put(result)
    read = [r.key for r in store.results()]
    assert read == sorted(r.key for r in made)


def test_putting_while_reading(store, monkeypatch):
    monkeypatch.setattr(store_module, "PAGE", 2)
    for seed in range(5):
        store.put(make_result(seed))
    for result in store.results():
        store.put(replace(result, facts={"again": True}))
    assert [r.facts for r in store.results()] == [{"again": True}] * 5


@pytest.mark.parametrize(
    "result",
    [
        replace(make_result(), metrics={"accuracy": float("nan")}),
        replace(make_result(), trace={"s": [float("inf")]}),
        replace(make_result(), facts={"when": object()}),
    ],
)
def test_what_is_no_result_is_refused_and_changes_nothing(store, result):
    with pytest.raises(InputError, match="a result, must be"):
        store.put(result)
    assert len(store) == 0
    store.put(make_result(weights="c" * 64))  # not even its weights are remembered


def test_mean_seconds_by_method_and_adapter(store):
    for seed, seconds in enumerate((1.0, 3.0)):
        store.put(make_result(seed, seconds=seconds))
        store.put(make_result(seed, adapter="trained", seconds=10 * seconds))
    store.put(replace(make_result(method="source"), facts={}))
    assert store.seconds() == {("tent", None): 2.0, ("tent", "trained"): 20.0}


def test_failures_stay_until_there_is_a_result(store, path):
    good, bad = make_result(0), make_result(1)
    for result in (good, bad):
        store.fail(result.cell, "Traceback ...\nfirst")
    store.fail(bad.cell, "Traceback ...\nsecond")
    store.put(good)
    with Store(path) as other:
        (failure,) = other.failures()
    assert (failure.key, failure.cell) == (bad.key, bad.cell)
    assert failure.error.endswith("second")
    assert "T" in failure.time
    assert bad.key not in store


# -- weights ----------------------------------------------------------------------------------


def test_a_model_has_the_weights_of_its_first_result(store):
    store.put(make_result(0))
    with pytest.raises(MismatchError, match=r"source model.*start another store"):
        store.put(make_result(1, weights="f" * 64))
    assert len(store) == 1
    store.put(make_result(1))
    other = Model({**MODEL.source, "norm": "iabn"}, MODEL.adapter, MODEL.seed)
    store.put(make_result(1, model=other, weights="f" * 64))
    assert len(store) == 3


def test_an_adapter_too(store):
    store.put(make_result(0, adapter="trained"))
    with pytest.raises(MismatchError, match="of the adapter"):
        store.put(make_result(1, adapter="trained", adapter_weights="f" * 64))
    other = Model(MODEL.source, {"epochs": 3}, MODEL.seed)
    store.put(make_result(1, adapter="trained", model=other, adapter_weights="f" * 64))
    assert len(store) == 2


def test_weights_that_the_caller_brings_do_not_replace_each_other(store):
    """Such a key does not say whose weights: two models would share it."""
    store.put(make_result(0, model=None))
    with pytest.raises(MismatchError):
        store.put(make_result(0, model=None, weights="f" * 64))
    store.put(make_result(1, model=None, weights="f" * 64))


# -- damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edit",
    [
        "content = substr(content, 1, 100)",
        "content = replace(content, '\"accuracy\":0.5', '\"accuracy\":0.9')",
        "content = X'FF00'",
        "trace = substr(trace, 1, 20)",
        "trace = NULL",
        "checksum = 'none'",
    ],
)
def test_an_edited_record_does_not_count(store, path, edit):
    hurt, whole = make_result(0), make_result(1)
    store.put(hurt)
    store.put(whole)
    change(path, f"UPDATE results SET {edit} WHERE key = ?", hurt.key)
    assert store.damaged() == [hurt.key]
    assert hurt.key not in store
    assert store.get(hurt.key) is None
    assert store.keys() == {whole.key}
    assert [r.key for r in store.results()] == [whole.key]
    assert len(store) == 1
    store.put(hurt)  # measured again
    assert store.damaged() == []
    assert store.get(hurt.key) == hurt


def test_a_record_under_another_key_does_not_count(store, path):
    store.put(make_result(0))
    change(path, "UPDATE results SET key = ?", make_result(1).key)
    assert store.keys() == set()


def test_a_truncated_file_is_named(store, path):
    for seed in range(50):
        store.put(make_result(seed, batches=50))
    store.close()
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"results\.db is damaged"), Store(path) as hurt:
        list(hurt.results())


# -- files that are no stores -----------------------------------------------------------------


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("content", [b"accuracy,0.5\n" * 100, b"x"])
def test_another_file_is_refused_and_left_alone(tmp_path, content, create):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a results store"):
        Store(path, create=create)
    assert path.read_bytes() == content


@pytest.mark.parametrize("sql", ["CREATE TABLE results (key)", "PRAGMA user_version = 1"])
def test_another_database_is_refused(tmp_path, sql):
    path = tmp_path / "photos.db"
    change(path, sql)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="not a results store"):
        Store(path)
    assert path.read_bytes() == before


def test_a_missing_store_is_not_made_unless_asked(tmp_path):
    with pytest.raises(StorageError, match=r"no results store at .*none\.db"):
        Store(tmp_path / "none.db", create=False)
    (tmp_path / "empty.db").touch()
    with pytest.raises(CheckpointError, match="not a results store"):
        Store(tmp_path / "empty.db", create=False)
    assert os.listdir(tmp_path) == ["empty.db"]


def test_a_name_with_odd_characters(tmp_path):
    path = tmp_path / "a b%20?mode=ro#c.db"
    with Store(path) as store:
        store.put(make_result())
    assert path.is_file()


def test_a_folder_is_no_store(tmp_path):
    with pytest.raises(StorageError, match="is a folder, not a results store"):
        Store(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write"):
        Store(tmp_path / "file" / "results.db")


@pytest.fixture
def locked_folder():
    """A folder that the one who runs the test may not write to, even if that is root."""
    root, nobody = os.geteuid() == 0, 65534
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Store(folder / "results.db") as store:
            store.put(make_result())
        folder.chmod(0o555)
        try:
            if root:
                os.seteuid(nobody)
            yield folder
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o755)


@pytest.mark.parametrize("name", ["results.db", "new.db"])
def test_a_read_only_folder(locked_folder, name):
    with pytest.raises(StorageError, match="a folder you may write to"):
        Store(locked_folder / name)


def test_a_full_disk(store):
    store.put(make_result(0))
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 2}")
    big = replace(make_result(1), facts={"text": "x" * 100_000})
    with pytest.raises(StorageError, match=r"full.*Free some space"):
        store.put(big)
    assert store.keys() == {make_result(0).key}
    store._db.execute(f"PRAGMA max_page_count = {pages + 100}")
    store.put(big)
    assert len(store) == 2


def test_somebody_who_never_stops_writing(store, path, monkeypatch):
    monkeypatch.setattr(store_module, "PATIENCE", 0.05)
    with Store(path) as hasty, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match="Another process has locked it"):
            hasty.put(make_result())
        assert len(hasty) == 0  # readers need not wait


# -- versions ---------------------------------------------------------------------------------


def test_a_store_of_an_old_version_is_brought_up_to_date(path, monkeypatch):
    result = make_result()
    with monkeypatch.context() as then:
        then.setattr(store_module, "MIGRATIONS", store_module.MIGRATIONS[:1])
        with Store(path) as old:
            with pytest.raises(CheckpointError, match="no such table: failures"):
                old.put(result)
            record = store_module._Record.seal(result.key, without_trace(result).to_json())
            old._write("results", record)
            assert old._ask("user_version") == 1
    with Store(path, create=False) as now:
        assert now._ask("user_version") == len(store_module.MIGRATIONS)
        assert list(now.results()) == [without_trace(result)]
        now.fail(result.cell, "Traceback")
        assert len(now.failures()) == 1


def test_a_migration_that_fails_leaves_the_store_as_it_was(store, path, monkeypatch):
    def broken(db: sqlite3.Connection) -> None:
        db.execute("ALTER TABLE results ADD COLUMN more")
        db.execute("nonsense")

    store.put(make_result())
    with monkeypatch.context() as then:
        then.setattr(store_module, "MIGRATIONS", [*store_module.MIGRATIONS, broken])
        with pytest.raises(CheckpointError, match="nonsense"):
            Store(path)
    with Store(path) as again:
        assert again.get(make_result().key) == make_result()


def test_a_newer_store_is_refused(store, path):
    store.close()
    newer = len(store_module.MIGRATIONS) + 1
    change(path, f"PRAGMA user_version = {newer}")
    with pytest.raises(CheckpointError, match=rf"got {newer}\. A newer twoshift"):
        Store(path)
