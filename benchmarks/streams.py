"""What many streams and many classes cost: ``python -m benchmarks.streams [--quick] [--out FILE]``.

The network is a ResNet-50 with random weights. Memory is what the operating system counts in a
fresh process, as in `benchmarks.speed`: everything above the process with the network alone. It
needs Linux with glibc.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor, nn

import twoshift
from benchmarks.speed import calibrated
from benchmarks.speed_report import Out, Quick, finish
from benchmarks.timing import Candidate, Check, milliseconds, resident, take_turns, timed
from twoshift import Calibration, models

BACKBONE, WIDTH, SIZE, CLASSES, MANY_CLASSES, STREAMS = "resnet50", 64, 32, 10, 1000, 1000
THREADS = 1  # two would wait for each other on a busy machine
FEW, READS = 50, 100  # streams that take turns, and their reads per round
BATCH, REPEATS = 64, 3
MB = 2**20 / 1e6  # `resident` counts in MiB


def network(classes: int) -> nn.Module:
    """The network that the streams share, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = models.create(BACKBONE, classes=classes, width=WIDTH)
    return net.eval()


def images(count: int) -> Tensor:
    """Random images."""
    return torch.rand(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def facts(net: nn.Module, classes: int) -> Calibration:
    """The calibration of the network, by images of the same size."""
    return calibrated(net, classes, SIZE)


def in_fresh_process(measure: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function that measures memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def meter() -> Callable[[], float]:
    """A function that returns the peak memory since now, in MB above that of now."""
    torch.set_num_threads(THREADS)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    return lambda: MB * (resident("VmHWM") - before)


class StreamMemory(NamedTuple):
    """Memory of one stream of many in MB: what the process grew by, and its tensors."""

    resident: float
    tensors: float


def stream_memory(count: int) -> StreamMemory:
    """What each of ``count`` streams that have predicted needs; call this in a fresh process."""
    torch.set_num_threads(THREADS)
    net, x = network(CLASSES), images(1)
    live = twoshift.recommended(net, facts(net, CLASSES))
    live.stream("first")(x)  # what is allocated once
    ctypes.CDLL(None).malloc_trim(0)  # streams would fill what the calibration has freed
    before = resident("VmRSS")
    for i in range(count):
        live.stream(f"camera {i}")(x)
    grown = MB * (resident("VmRSS") - before)
    state = live.stream("camera 0").state()
    return StreamMemory(grown / count, sum(t.nbytes for t in state.values()) / 1e6)


def switch_checks(rounds: int) -> list[Check]:
    """What it costs that another stream has the network: alone, and within a call."""
    net, x = network(CLASSES), images(1)
    known = facts(net, CLASSES)
    shared, single = (twoshift.recommended(net, known) for _ in range(2))
    streams = itertools.cycle([shared.stream(f"camera {i}") for i in range(FEW)])
    only = single.stream("only")

    def switch() -> None:
        for _ in range(READS):
            _ = next(streams).prior  # a read that needs the state

    times = take_turns({"switch": Candidate(switch)}, rounds)
    pair = {"another": Candidate(lambda: next(streams)(x)), "same": Candidate(lambda: only(x))}
    calls = take_turns(pair, 4 * rounds)
    return [
        milliseconds("switch to another stream", [t / READS for t in times["switch"]], 1.0),
        milliseconds("call of a stream, one image", calls["same"]),
        timed("call of another stream / of the same one", calls, "another", "same", 1.05),
    ]


def stream_checks(rounds: int, streams: int) -> list[Check]:
    """Many streams over one network."""
    memory = in_fresh_process(stream_memory, streams)
    name = f"{streams:,} streams, C={CLASSES}"
    return [
        Check(f"{name}, memory of each", memory.resident, high=1.0, unit="MB"),
        Check(f"{name}, tensors of each", memory.tensors, high=1.0, unit="MB"),
        *switch_checks(rounds),
    ]


class Cost(NamedTuple):
    """Seconds, and peak memory in MB above the model."""

    seconds: float
    peak: float


def calibrating(folder: Path) -> Cost:
    """Calibrate the model, and save; call this and the following in a fresh process."""
    net, peak = network(MANY_CLASSES), meter()
    seconds, known = clocked(lambda: facts(net, MANY_CLASSES))
    cost = Cost(seconds, peak())
    known.save(folder)
    return cost


def loading(folder: Path) -> Cost:
    """Load a calibration, several times."""
    net, peak = network(MANY_CLASSES), meter()
    cost = Cost(
        median(clocked(lambda: Calibration.load(folder))[0] for _ in range(REPEATS)), peak()
    )
    del net  # was there until now
    return cost


def saving(folder: Path, to: Path) -> Cost:
    """Save a calibration, several times; the peak includes the calibration itself."""
    net, peak = network(MANY_CLASSES), meter()
    known = Calibration.load(folder)
    cost = Cost(median(clocked(lambda: known.save(to))[0] for _ in range(REPEATS)), peak())
    del net
    return cost


def predicting(folder: Path) -> Cost:
    """Build what is recommended, and predict batches; the time is that of one batch."""
    net, x, peak = network(MANY_CLASSES), images(BATCH), meter()
    live = twoshift.recommended(net, folder)
    return Cost(median(clocked(lambda: live(x))[0] for _ in range(REPEATS)), peak())


def clocked(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and the result."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def class_checks() -> list[Check]:
    """A network with many classes."""
    with TemporaryDirectory() as parent:
        folder, name = Path(parent) / "facts", f"C={MANY_CLASSES}"
        calibrate = in_fresh_process(calibrating, folder)
        save = in_fresh_process(saving, folder, Path(parent) / "again")
        load = in_fresh_process(loading, folder)
        predict = in_fresh_process(predicting, folder)
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    return [
        Check(f"calibration on disk, {name}", size, high=250, unit="MB"),
        Check(f"Calibration.save, {name}", save.seconds, high=5, unit="s"),
        Check(f"Calibration.save, {name}, peak", save.peak, high=1000, unit="MB"),
        Check(f"Calibration.load, {name}", load.seconds, high=5, unit="s"),
        Check(f"Calibration.load, {name}, peak", load.peak, high=1000, unit="MB"),
        Check(f"recommended and {BATCH} images, {name}, peak", predict.peak, high=1000, unit="MB"),
        Check(f"{BATCH} images, {name}", predict.seconds, unit="s"),
        Check(f"calibrate, {name}, peak", calibrate.peak, unit="MB"),
        Check(f"calibrate, {name}", calibrate.seconds, unit="s"),
    ]


def main(quick: Quick = False, out: Out = Path("results/streams-speed.json")) -> None:
    """Measure, print and write; the exit code is 1 if a limit is broken."""
    torch.set_num_threads(THREADS)
    checks = stream_checks(5 if quick else 25, 20 if quick else STREAMS)
    settings = {"network": f"{BACKBONE}, width {WIDTH}", "size": SIZE, "threads": THREADS}
    finish(out, [*checks, *class_checks()], settings=settings)


if __name__ == "__main__":
    typer.run(main)
