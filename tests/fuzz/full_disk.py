"""Saving onto a disk that is full, or becomes full: refused, and the old content is still there.

A case saves one kind of thing with a random number of bytes left. The disk is a small file system
in memory; where none can be mounted, the size of files is limited instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import random
import resource
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.adapters import cases
from tests.bench.stored import make_result
from tests.fuzz.batches import build, calibration
from tests.fuzz.workers import Case
from tests.toys import make_batches, make_net
from twoshift import models
from twoshift.adapters import load_adapter, save_adapter
from twoshift.bench.export import export_csv, export_parquet
from twoshift.bench.store import Store, export_lines
from twoshift.calibration import Calibration
from twoshift.cli.report import report_command
from twoshift.data.encoded import _unpack
from twoshift.errors import StorageError
from twoshift.methods import Method
from twoshift.report import draw
from twoshift.storage import write_json
from twoshift.train.checkpoint import SourceCard, load_source, save_source
from twoshift.train.loop import save_state, saved_epoch

SIZE = 4 << 20  # bytes of the small disk
PAGE = 4096
NEW_NAMESPACE = 0x00020000  # CLONE_NEWNS: the mount is gone with this process
# save something in its first or second version, and tell which version is there
Save = Callable[[Path, int], Any]
Kind = tuple[Save, Callable[[Path], int]]
NETS = ("mlp", "resnet_bn")


def prepare(folder: Path) -> Case:
    """See `tests.fuzz.workers`."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = _mount(disk)
    known = dict(sorted(_kinds(folder).items()))

    def try_one(rng: random.Random, case: int) -> Counter[str]:
        name = list(known)[case * 5 % len(known)]  # neighbours are of all kinds
        for left in disk.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            return _fill(name, known[name], disk, rng, mounted)
        except Exception as e:
            e.add_note(name)
            raise

    return try_one


def _fill(name: str, kind: Kind, disk: Path, rng: random.Random, mounted: bool) -> Counter[str]:
    save, version = kind
    path = disk / name
    before_all = _used(disk)
    save(path, 0)
    assert version(path) == 0
    needed = max(_used(disk) - before_all, PAGE)
    before = _content(disk)
    free = rng.choice([0, rng.randrange(PAGE), rng.randrange(needed + PAGE)])
    happened = "it fitted"
    try:
        with _filled(disk, free, mounted):
            save(path, 1)
    except StorageError:
        happened = "StorageError"
    now = version(path)
    assert now == (happened == "it fitted"), f"version {now} is there, although: {happened}"
    if happened != "it fitted":
        left = _content(disk) - before
        assert not left, f"left behind: {left}"
    save(path, 1)  # as soon as there is space again
    assert version(path) == 1
    return Counter({"saves": 1, happened: 1, f"{name} refused": happened != "it fitted"})


def _content(disk: Path) -> set[str]:
    # SQLite keeps its own files beside a store
    paths = (str(p.relative_to(disk)) for p in disk.rglob("*"))
    return {p for p in paths if not p.endswith(("-wal", "-shm", "-journal", "filler"))}


def _used(disk: Path) -> int:
    return sum(-(-p.stat().st_size // PAGE) * PAGE for p in disk.rglob("*") if p.is_file())


def _mount(disk: Path) -> bool:
    libc = ctypes.CDLL(None)
    if os.geteuid() or libc.unshare(NEW_NAMESPACE):
        return False
    make_private = ["mount", "--make-rprivate", "/"]
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)]
    with contextlib.suppress(OSError):
        return not any(
            subprocess.run(command, capture_output=True, check=False).returncode
            for command in (make_private, mount)
        )
    return False


@contextmanager
def _filled(disk: Path, free: int, mounted: bool) -> Iterator[None]:
    """Inside, ``free`` bytes are left, or a file may have so many."""
    if not mounted:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (free, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return
    filler = disk / "filler"
    try:
        there = os.statvfs(disk)
        size = there.f_bavail * there.f_bsize - free // PAGE * PAGE
        filler.write_bytes(bytes(size))
        yield
    finally:
        filler.unlink()


def _kinds(folder: Path) -> dict[str, Kind]:
    stores = [_store(folder / f"results {i}.db", i + 1) for i in range(2)]
    files: dict[str, Save] = {
        "lines.jsonl": lambda path, v: _export(stores[v], export_lines, path),
        "table.csv": lambda path, v: _export(stores[v], export_csv, path),
        "table.parquet": lambda path, v: _export(stores[v], export_parquet, path),
        "page.html": lambda path, v: report_command(stores[v], [path]),
        "page.md": lambda path, v: report_command(stores[v], [path]),
        "numbers.json": lambda path, v: write_json(path, [v] * 5000),
        "figure.png": lambda path, v: draw.save(draw.canvas(1, 1 + v, (3, 2), "toy")[0], path),
    }
    if importlib.util.find_spec("pyarrow") is None:
        del files["table.parquet"]  # needs an extra
    return {
        **_models(),
        **{name: (save, _known(folder / "whole" / name, save)) for name, save in files.items()},
        "calibration": (lambda path, v: calibration(NETS[v]).save(path), _calibration_version),
        "results.db": (_put, _stored),
        "unpacked": (_unpacked, lambda path: len(list(path.glob("cache/unpacked/*"))) - 1),
    }


def _known(path: Path, save: Save) -> Callable[[Path], int]:
    """Tell versions of a file by their content, which is the same every time."""

    @cache
    def known() -> list[bytes]:
        contents = []
        for version in range(2):
            save(path, version)
            contents.append(path.read_bytes())
        return contents

    return lambda saved: known().index(saved.read_bytes())


def _models() -> dict[str, Kind]:
    net = make_net("resnet_bn")
    methods, batch = [build("tent", "resnet_bn", True) for _ in range(2)], make_batches("resnet_bn")
    methods[0](batch[0])
    methods[1](batch[1])
    states = [method.state() for method in methods]
    adapters = [cases.make(name, net) for name in ("label_shift", "logit")]
    settings = {"classes": 3, "width": 4, "blocks": 1, "mean": [0.5] * 3, "std": [0.2] * 3}
    source = models.create("resnet18_cifar", **settings)
    optimiser = torch.optim.SGD(source.parameters(), lr=0.1)

    def card(seed: int) -> SourceCard:
        names = (list("abc"), [9, 4, 1])
        return SourceCard("resnet18_cifar", settings, *names, "toy", {}, "cross_entropy", {}, seed)

    def state_version(path: Path) -> int:
        there = Method.load(path, net).state()
        return [all(there[n].equal(s[n]) for n in s) for s in states].index(True)

    def epoch(path: Path) -> int:
        found = saved_epoch(path, {})
        assert found is not None
        return found[0]

    return {
        "state": (lambda path, v: methods[v].save(path), state_version),
        "adapter": (
            lambda path, v: save_adapter(path, adapters[v]),
            lambda path: [type(a) for a in adapters].index(type(load_adapter(path))),
        ),
        "source": (
            lambda path, v: save_source(path, source, card(v)),
            lambda path: load_source(path).card.seed,
        ),
        "training": (lambda path, v: save_state(path, source, optimiser, v, {}), epoch),
    }


def _calibration_version(path: Path) -> int:
    return [calibration(net).source for net in NETS].index(Calibration.load(path).source)


def _store(path: Path, results: int) -> Path:
    with Store(path) as store:
        for seed in range(results):
            store.put(make_result(seed))
    return path


def _export(store: Path, export: Callable[[Store, Path], int], path: Path) -> None:
    with Store(store, create=False) as opened:
        export(opened, path)


def _put(path: Path, version: int) -> None:
    with Store(path) as store:
        store.put(make_result(version, batches=2000))


def _stored(path: Path) -> int:
    with Store(path, create=False) as store:
        assert not store.damaged()
        return len([r for r in store.results(trace=True) if r.trace is not None]) - 1


def _unpacked(path: Path, version: int) -> None:
    rng = np.random.default_rng(version)
    _unpack("toy", [rng.bytes(5000) for _ in range(9)], path)
