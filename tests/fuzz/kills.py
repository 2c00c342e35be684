"""Processes that are killed while they save, with a reader beside them all the time.

Run by itself, it prints what happened: ``python -m tests.fuzz.kills 200 0``.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

from tests.saved import names
from tests.toys import make_batches, make_method, make_net
from twoshift.methods import Method
from twoshift.storage import CARD, read_folder, save_folder, saved_files

ROOT = Path(__file__).resolve().parents[2]
KIND = "number"


def kill_while_saving(
    kills: int, seed: int, *, longest: float = 0.08, savers: int = 1
) -> dict[str, int]:
    """Kill a saving process ``kills`` times, at random moments.

    All in a process of its own, which starts every saving process by a fork: that is quick, and
    no thread of the caller is in the way. Returns how often what happened.

    Args:
        kills: How many times.
        seed: Seed of the moments.
        longest: Longest time from the start of a saving process to its end, in seconds.
        savers: How many processes save to one folder at once; all are killed.

    Raises:
        AssertionError: A folder could not be read, was torn, or had something left in it.
    """
    arguments = map(str, (kills, seed, longest, savers))
    command = [sys.executable, "-m", "tests.fuzz.kills", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    happened: dict[str, int] = json.loads(result.stdout)
    return happened


class Saver:
    """Saves a number, in several files, and an adaptation state, again and again."""

    def __init__(self, folder: Path) -> None:
        self.plain, self.state = folder / "plain", folder / "state"
        self.net, batches = make_net("mlp"), make_batches("mlp")
        self.live = make_method("tent", self.net, True)
        self.states = []
        for x in batches:
            self.live(x)
            self.states.append(self.live.state())
        self.saved = mmap.mmap(-1, 8)  # the last number that was saved; shared with forks

    def save(self, number: int) -> None:
        size = 1 + number % 7 * 1000  # files of all sizes
        parts = {name: {"n": torch.full((size,), number)} for name in ("one", "two", "three")}
        save_folder(self.plain, KIND, {"number": number}, parts)
        self.live.load_state(self.states[number % len(self.states)])
        self.live.save(self.state)
        self.saved[:] = struct.pack("q", number)

    def last(self) -> int:
        return int(struct.unpack("q", self.saved[:])[0])

    def read(self) -> int:
        """The number on disk; what was torn is an AssertionError."""
        found = read_folder(self.plain, KIND)
        number = found.card["number"]
        for name in ("one", "two", "three"):
            assert found.tensors[name]["n"].unique().tolist() == [number], f"torn: {name}"
        restored = Method.load(self.state, self.net).state()
        assert any(_same(restored, state) for state in self.states), "torn state"
        return number

    def check_swept(self) -> None:
        for folder in (self.plain, self.state):
            files = [path.name for path in saved_files(folder).values()]
            assert names(folder) == sorted({CARD, *files}), names(folder)


def _same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def _fork(saver: Saver, first: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            for number in itertools.count(saver.last() + 1 + first):
                saver.save(number)
        finally:
            traceback.print_exc()
            os._exit(1)
    return child


def main(kills: int, seed: int, longest: float, savers: int) -> dict[str, int]:
    """What `kill_while_saving` runs in its process."""
    rng, happened = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder))
        saver.save(1)
        for _ in range(kills):
            children = [_fork(saver, first) for first in range(savers)]
            end = time.monotonic() + rng.uniform(0, longest)
            while time.monotonic() < end:
                saver.read()
                happened["read beside"] += 1
            for child in children:
                os.kill(child, signal.SIGKILL)
                assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "a saving process failed"
            before, after = saver.last(), saver.read()
            if savers == 1:
                assert after in (before, before + 1), f"{before} was saved, {after} was read"
            happened["old" if after == before else "new"] += 1
            happened["left behind"] += any(p.name.startswith(".") for p in saver.plain.iterdir())
            saver.save(after + 1)
            saver.check_swept()
            happened["kills"] += 1
        happened["saved"] = saver.last()
    return dict(happened)


if __name__ == "__main__":
    count, seed, *rest = sys.argv[1:]
    longest, savers = rest or ("0.08", "1")
    happened = main(int(count), int(seed), float(longest), int(savers))
    sys.stdout.write(json.dumps(happened) + "\n")
