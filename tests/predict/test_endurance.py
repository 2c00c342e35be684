"""Runs that are long, and runs that are killed for good."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.predict.small import MY_NET, SIDE, known_of, make_net, pixels, write_images
from twoshift.predict.inputs import Gallery
from twoshift.predict.run import Options, predict

ROOT = Path(__file__).resolve().parents[2]
IMAGES, GROWTH = 200_000, 50 << 20


@pytest.mark.slow
@pytest.mark.parametrize("passes", [None, 2])
def test_memory_is_flat_over_many_images(ready, tmp_path, passes):
    some = pixels(1000, 5, 0.6)[0]
    ids = [f"image {i}" for i in range(IMAGES)]
    gallery = Gallery(
        "many",
        ids,
        ["default"] * IMAGES,
        np.arange(IMAGES),
        lambda rows: [some[row % 1000] for row in rows],
    )
    seen = []

    def watch(done: int, total: int, facts: str) -> None:
        if done % 4096 == 0 or done == total:
            seen.append(psutil.Process().memory_info().rss)

    options = Options(tmp_path / "out.csv", batch_size=256, baseline=False, passes=passes)
    predict(ready, gallery, options, watch)
    early = max(seen[: len(seen) // 10])
    assert max(seen) - early < GROWTH
    with options.out.open() as file:
        assert sum(1 for _ in file) == IMAGES + 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["online", "offline"])
def test_a_process_that_is_killed_again_and_again(tmp_path, how):
    known = known_of(make_net)
    (tmp_path / "my_net.py").write_text(MY_NET)
    torch.save(known.net.state_dict(), tmp_path / "w.pth")
    known.facts.save(tmp_path / "facts")
    write_images(tmp_path / "images", 400)
    paths = sorted(map(str, (tmp_path / "images").rglob("*.png")))
    (tmp_path / "list.txt").write_text("\n".join(paths * 60))  # 24,000: six parts

    def command(name: str) -> list[str]:
        words = ["predict", f"list:{tmp_path / 'list.txt'}", "-o", f"{tmp_path / name}.csv"]
        words += ["--model", f"{tmp_path / 'my_net.py'}:make_net", "--weights", f"{tmp_path}/w.pth"]
        words += ["--calibration", f"{tmp_path / 'facts'}", "--frame", str(SIDE)]
        more = ["--offline"] if how == "offline" else ["--state", str(tmp_path / f"{name}-state")]
        return [sys.executable, "-m", "twoshift.cli", *words, *more]

    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = time.monotonic()
    subprocess.run(command("whole"), check=True, env=environment, **quiet)
    took = time.monotonic() - start
    chance, kills = random.Random(0), 0
    while True:
        process = subprocess.Popen(command("killed"), env=environment, **quiet)
        try:
            code = process.wait(chance.uniform(0.4, 0.95) * took)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            assert kills < 50
            continue
        assert code == 0
        break
    assert kills
    assert (tmp_path / "killed.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    if how == "online":
        files = [{p.name for p in (tmp_path / f"{n}-state").iterdir()} for n in ("whole", "killed")]
        assert files[0] == files[1]  # named by their content
