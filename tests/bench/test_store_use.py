"""A store among processes that write or are killed, as JSON lines, and its speed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest

from tests.bench.stored import make_result, without_trace
from twoshift.bench import store as store_module
from twoshift.bench.store import Store, export_lines, import_lines
from twoshift.errors import InputError, MismatchError, StorageError

processes = multiprocessing.get_context("forkserver")  # imports torch once for all children
processes.set_forkserver_preload(["tests.bench.test_store_use"])
RECORD = make_result(1).to_json()


# -- processes --------------------------------------------------------------------------------


def write_all(path: Path, start, seeds: range) -> None:
    start.wait()
    with Store(path) as store:  # all of them make the store at once
        for seed in seeds:
            store.put(make_result(seed))


def test_processes_write_at_once(path):
    count, each = 3, 20
    start = processes.Barrier(count)
    # half of what a process writes is written by the next one, too
    shares = [range(i * each, (i + 1) * each + each // 2) for i in range(count)]
    children = [processes.Process(target=write_all, args=(path, start, s)) for s in shares]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [c.exitcode for c in children] == [0] * count
    with Store(path) as store:
        wanted = {make_result(seed).key for seed in range(count * each + each // 2)}
        assert store.keys() == wanted
        assert store.damaged() == []


def write_for_ever(path: Path, first: int, said) -> None:
    with Store(path) as store:
        for seed in range(first, first + 100_000):
            store.put(make_result(seed, batches=200))
            said.send(seed)


def kill_a_writer(path: Path, first: int, wait: float) -> list[int]:
    """Start a writer, kill it in the middle; what it said it had stored."""
    listen, said = processes.Pipe(duplex=False)
    child = processes.Process(target=write_for_ever, args=(path, first, said))
    child.start()
    said.close()
    seeds = [listen.recv()]
    time.sleep(wait)
    child.kill()
    child.join()
    while True:
        try:
            seeds.append(listen.recv())
        except EOFError:
            return seeds


def test_a_killed_writer_loses_nothing(path):
    rng = random.Random(0)
    stored: list[int] = []
    for i in range(5):
        stored += kill_a_writer(path, 100_000 * i, rng.uniform(0, 0.05))
        with Store(path) as store:
            assert store.keys() >= {make_result(seed).key for seed in stored}
            assert len(store) <= len(stored) + i + 1  # at most one that it could not tell of
            assert store.damaged() == []
    with Store(path) as store:
        assert store.get(make_result(stored[-1]).key) == make_result(stored[-1], batches=200)


# -- JSON lines -------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", [False, True])
def test_lines_out_and_in(store, tmp_path, trace):
    made = [make_result(seed, adapter="trained") for seed in range(4)]
    for result in made:
        store.put(result)
    lines = tmp_path / "results.jsonl"
    assert export_lines(store, lines, trace) == 4
    assert len(lines.read_text().splitlines()) == 4
    with Store(tmp_path / "other.db") as other:
        assert import_lines(other, lines) == 4
        assert import_lines(other, lines) == 0
        assert list(other.results(trace=True)) == list(store.results(trace))
        export_lines(other, tmp_path / "again.jsonl", trace)
    assert (tmp_path / "again.jsonl").read_bytes() == lines.read_bytes()


def test_an_import_keeps_what_is_there(store, tmp_path):
    lines = tmp_path / "results.jsonl"
    published = [without_trace(make_result(seed, accuracy=0.9)) for seed in (0, 1, 1)]
    lines.write_text("".join(json.dumps(r.to_json()) + "\n" for r in published))
    store.put(make_result(0))
    assert import_lines(store, lines) == 1
    assert store.get(make_result(0).key) == make_result(0)


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (RECORD | {"key": "0" * 32}, InputError, "key of a result, must be that of its"),
        (make_result(1, weights="f" * 64).to_json(), MismatchError, "weights of the source model"),
        ({"cell": RECORD["cell"]}, InputError, "none of its key, metrics, source"),
        (RECORD | {"cell": {"method": "tent", "colour": "red"}}, InputError, "'colour'"),
        (RECORD | {"cell": {"method": "tend"}}, InputError, "Did you mean 'tent'"),
        (RECORD | {"source": {}}, InputError, "known by its weights"),
        (RECORD | {"source": {"weights": "f" * 64}}, InputError, "described by dataset, arch"),
        ([1, 2], InputError, "what run_cell returns"),
        ("{'half", InputError, "double quotes"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_imported(store, tmp_path, wrong, error, says):
    lines = tmp_path / "results.jsonl"
    second = wrong if isinstance(wrong, str) else json.dumps(wrong)
    lines.write_text(json.dumps(make_result(0).to_json()) + "\n" + second + "\n")
    with pytest.raises(error, match=rf"results\.jsonl, line 2: .*{says}"):
        import_lines(store, lines)
    assert len(store) == 0
    store.put(make_result(0, weights="c" * 64))


def test_lines_that_cannot_be_read(store, tmp_path):
    with pytest.raises(StorageError, match="cannot read"):
        import_lines(store, tmp_path / "none.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(InputError, match="line 1"):
        import_lines(store, tmp_path / "binary.jsonl")


# -- speed ------------------------------------------------------------------------------------


def test_five_thousand_results_are_looked_through_in_a_second(path):
    content, trace = without_trace(make_result()).to_json(), os.urandom(5000)
    with Store(path) as store:
        text = store_module._canonical(content)
        with store._writing():
            for i in range(5000):
                checksum = store_module._checksum(key := f"{i:032x}", text, trace)
                store._write("results", store_module._Record(key, text, trace, checksum))
        start = time.process_time()  # others may keep the machine busy
        assert len(store.keys()) == 5000
        assert time.process_time() - start < 1
        assert sum(1 for _ in store.results()) == 5000
        assert time.process_time() - start < 2
