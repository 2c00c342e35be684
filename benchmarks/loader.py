"""Whether images load fast enough to keep a model busy: ``python -m benchmarks.loader [--quick]``.

Compares the seconds per image of the loader with those of a forward pass, in one run in which both
take turns: files that are decoded each time with a ResNet-50 at 224 pixels, and cached images with
the slim ResNet-18 at their own size. The JPEG files are generated: 500 x 375 pixels, quality 90,
with the spectrum of photographs. Batches are as in a stream: float32, channels last.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import torch
import typer
from PIL import Image
from torch import nn

from benchmarks.speed_report import Out, Quick, finish
from benchmarks.timing import Candidate, Check, take_turns, timed
from twoshift import models
from twoshift.data.files import CACHE_MB, ImageFiles
from twoshift.data.photographs import photograph
from twoshift.data.stream import to_float
from twoshift.predict.inputs import open_gallery
from twoshift.predict.plan import cut
from twoshift.predict.reading import Decoding, read_batch

FILES, BATCH, THREADS = 64, 16, 2
WIDTH, HEIGHT, QUALITY = 500, 375, 90
CACHED, COLD = 0.5, 0.2  # limits as shares of a forward pass: twice and five times as fast
PREDICTED = 1 / 1.2
SIZES = {32: 32, 224: 256}  # size -> frame


def write_photographs(folder: Path, count: int = FILES) -> list[Path]:
    """Write JPEG files, and return their paths."""
    rng = np.random.default_rng(0)
    paths = [folder / f"{number}.jpg" for number in range(count)]
    for path in paths:
        Image.fromarray(photograph(rng, HEIGHT, WIDTH)).save(path, quality=QUALITY)
    return paths


def loading(paths: list[Path], size: int, megabytes: int) -> Candidate:
    """Load batch after batch; the cache is large enough for all images, or 0 for none."""
    with mock.patch.dict(os.environ, {CACHE_MB: str(megabytes)}):
        images = ImageFiles(paths, size, SIZES[size])
        images[slice(None)]  # fills the cache
    parts = itertools.cycle(slice(i, i + BATCH) for i in range(0, len(paths), BATCH))
    return Candidate(lambda: to_float(images[next(parts)]))


def reading(paths: list[Path], size: int) -> Candidate:
    """Read batch after batch as ``twoshift predict`` does, which keeps no image."""
    (folder,) = {path.parent for path in paths}
    gallery, decoding = open_gallery(str(folder)), Decoding(size, SIZES[size])
    batches = itertools.cycle(cut(gallery, BATCH))
    return Candidate(lambda: read_batch(gallery, decoding, next(batches)))


def forward(net: nn.Module, size: int) -> Candidate:
    """Predict one batch."""
    layout = torch.channels_last
    net.eval().to(memory_format=layout)  # type: ignore[call-overload]
    x = torch.rand(BATCH, 3, size, size).contiguous(memory_format=layout)
    return Candidate(torch.no_grad()(lambda: net(x)))


def loader_checks(rounds: int) -> list[Check]:
    """Compare the loader with forward passes."""
    checks = []
    with TemporaryDirectory() as folder:
        paths = write_photographs(Path(folder))
        for size in SIZES:
            slim = models.create("resnet18_cifar", classes=10, width=16)
            pair = {
                f"decoded images, {size} px": loading(paths, size, 1024),
                f"width-16 forward, {size} px": forward(slim, size),
            }
            checks += compared(pair, max(rounds // 5, 4), CACHED)
        large = models.create("resnet50", classes=1000)
        pair = {"JPEG files, 224 px": loading(paths, 224, 0), "ResNet-50": forward(large, 224)}
        checks += compared(pair, max(rounds // 10, 4), COLD)
        pair = {"images to predict, 224 px": reading(paths, 224), "ResNet-50": pair["ResNet-50"]}
        checks += compared(pair, max(rounds // 10, 4), PREDICTED)[:2]
    return checks


def compared(pair: dict[str, Candidate], rounds: int, high: float) -> list[Check]:
    """A limit on the ratio of two candidates, and the images per second of each."""
    times = take_turns(pair, rounds)
    load, model = pair
    ratio = timed(f"{load} / {model}", times, load, model, high)
    return [ratio, *(Check(n, BATCH / median(t), unit="images/s") for n, t in times.items())]


def main(quick: Quick = False, out: Out = Path("results/loader-speed.json")) -> None:
    """Measure, print and write; the exit code is 1 if a limit is broken."""
    torch.set_num_threads(THREADS)
    finish(out, loader_checks(20 if quick else 60), threads=THREADS)


if __name__ == "__main__":
    typer.run(main)
