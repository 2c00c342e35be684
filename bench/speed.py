"""What things cost: ``python -m bench.speed [--quick] [--out results/speed.json]``.

Times are compared within one run only. The candidates of a comparison take turns, each round
starting with another one, and the value is the median over the rounds of the ratio inside a
round: what slows the machine down for a second slows both sides.

Memory is what the operating system sees: the largest resident size of a fresh process while it
adapts to a few batches, above its size with the model built and before the first batch. Unlike
torch's own count it includes the scratch space of the convolutions. It needs Linux.
"""

from __future__ import annotations

import copy
import itertools
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import twoshift
from twoshift import methods, models
from twoshift.adapter import AdaptedHead, LabelShiftAdapter, attach
from twoshift.errors import ModelError, TwoshiftError
from twoshift.estimators import EMA
from twoshift.methods import LabelAware, Method, Tent
from twoshift.storage import write_json

BACKBONE, WIDTH, BATCH, SIZE, THREADS = "resnet18_cifar", 16, 64, 32, 2
EXPECTED_PARAMETERS, PAPER_MACS = 0.124e6, 0.11e6  # of the adapter, at d = 512 and C = 100
REFRESH = 20  # rounds until methods start afresh: a collapsed model is slow (denormal numbers)
MEMORY_BATCHES = 8

# settings of methods that need facts about the source: name -> settings
REQUIRED: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True)
class Check:
    """A measured value and the range it must stay in; without ``high`` it is only reported."""

    name: str
    value: float
    low: float = 0.0
    high: float | None = None
    unit: str = "x"  # a ratio; otherwise what is counted
    spread: tuple[float, float] | None = None  # quartiles over the rounds

    @property
    def ok(self) -> bool:
        """Whether the value is in its range."""
        return self.low <= self.value and (self.high is None or self.value <= self.high)


class Candidate(NamedTuple):
    """Something to time, and how to bring it back to where it started."""

    run: Callable[[], object]
    reset: Callable[[], object] = lambda: None


Times = dict[str, list[float]]


def take_turns(candidates: dict[str, Candidate], rounds: int) -> Times:
    """Seconds of every candidate in every round; they take turns within a round."""
    names, times = list(candidates), {name: list[float]() for name in candidates}
    for i in range(rounds):
        if i % REFRESH == 0:
            for candidate in candidates.values():
                candidate.reset()
                for _ in range(2):  # the optimiser's first step allocates its state
                    candidate.run()
        first = i % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            candidates[name].run()
            times[name].append(time.perf_counter() - start)
    return times


def ratios(times: Times, name: str, to: str) -> list[float]:
    """The ratio of two candidates in every round."""
    return [a / b for a, b in zip(times[name], times[to], strict=True)]


def timed(what: str, times: Times, name: str, to: str, high: float) -> Check:
    """A limit on the median ratio of two candidates."""
    r = ratios(times, name, to)
    low, middle, upper = quantiles(r, n=4, method="inclusive")
    return Check(what, middle, high=high, spread=(low, upper))


def network(norm: str = "bn", classes: int = 10) -> nn.Module:
    """The network of the time measurements, channels last, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = models.create(BACKBONE, classes=classes, width=WIDTH, norm=norm)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net.eval()


def batches(count: int = 4) -> list[Tensor]:
    """Random images, channels last."""
    g = torch.Generator().manual_seed(1)
    shape = (BATCH, 3, SIZE, SIZE)
    layout = torch.channels_last
    return [torch.rand(shape, generator=g).contiguous(memory_format=layout) for _ in range(count)]


def plain_forward(net: nn.Module) -> Candidate:
    """Prediction without adaptation: what everything is compared with."""
    feed = itertools.cycle(batches())

    @torch.no_grad()
    def run() -> Tensor:
        return net(next(feed))

    return Candidate(run)


def training(net: nn.Module, backward: bool) -> Candidate:
    """A forward pass in training mode, and a backward pass through all weights if wanted."""
    net, feed = copy.deepcopy(net).train(), itertools.cycle(batches())

    def run() -> None:
        net.zero_grad(set_to_none=True)
        loss = net(next(feed)).logsumexp(1).mean()
        if backward:
            loss.backward()

    return Candidate(run)


def adapting(method: Method) -> Candidate:
    """A method on its stream."""
    feed = itertools.cycle(batches())
    return Candidate(lambda: method(next(feed)), method.reset)


def busy_adapter(features: int, classes: int) -> LabelShiftAdapter:
    """An adapter with random weights: a fresh one is the identity, and zeros may be cheap."""
    adapter = LabelShiftAdapter(features, classes)
    g = torch.Generator().manual_seed(2)
    for parameter in adapter.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g) * 0.05
    return adapter.eval()


def norm_checks(rounds: int) -> list[Check]:
    """IABN against BN in the same network."""
    nets, checks = {norm: network(norm) for norm in ("bn", "iabn")}, []
    kinds: dict[str, tuple[Callable[[nn.Module], Candidate], float]] = {
        "IABN / BN, forward, evaluation": (plain_forward, 2.0),
        "IABN / BN, forward, training": (lambda net: training(net, backward=False), 2.0),
        "IABN / BN, forward + backward": (lambda net: training(net, backward=True), 1.6),
    }
    for what, (make, high) in kinds.items():
        times = take_turns({norm: make(net) for norm, net in nets.items()}, rounds)
        checks.append(timed(what, times, "iabn", "bn", high))
    return checks


def tent_checks(rounds: int) -> list[Check]:
    """TENT against a plain forward pass, and what the adapter adds to it."""
    net = network()
    times = take_turns({"forward": plain_forward(net), "tent": adapting(Tent(net))}, rounds)
    checks = [timed("TENT / forward", times, "tent", "forward", 2.5)]
    for classes in (10, 100):
        net = network(classes=classes)
        adapted = Tent(attach(net, busy_adapter(8 * WIDTH, classes)))
        pair = {"tent": Tent(net), "adapted": LabelAware(adapted, EMA(classes))}
        # a limit of 5 % needs a sharper median
        times = take_turns({name: adapting(method) for name, method in pair.items()}, 2 * rounds)
        checks.append(timed(f"TENT + adapter / TENT, C={classes}", times, "adapted", "tent", 1.05))
    return checks


def count_checks() -> list[Check]:
    """Parameters, multiply-adds and gradients: the same on every machine."""
    small = parameters(LabelShiftAdapter(512, 100))
    large = parameters(LabelShiftAdapter(2048, 1000))
    added, total = adapter_macs(512, 100), model_macs(width=64, classes=100)
    tent = Tent(net := network())
    tent_ratio = count_macs(lambda: tent(batches(1)[0])) / count_macs(plain_forward(net).run)
    return [
        Check("adapter parameters, d=512, C=100", small, unit="parameters"),
        Check("adapter parameters / 0.124M", small / EXPECTED_PARAMETERS, 0.99, 1.01),
        Check("adapter parameters, d=2048, C=1000", large, high=1e6 - 1, unit="parameters"),
        Check("adapter MACs, d=512, C=100", added, unit="MACs"),
        Check("adapter MACs / the paper's 0.11M", added / PAPER_MACS),
        Check("ResNet-18 MACs, width 64, C=100", total, unit="MACs"),
        Check("adapter MACs / ResNet-18 MACs", added / total),
        Check("frozen weights with a gradient", frozen_gradients(tent), high=0, unit="tensors"),
        # gradients of the weights would make it three
        Check("TENT MACs / forward MACs", tent_ratio, high=2.0),
    ]


def parameters(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in module.parameters())


def frozen_gradients(method: Method) -> int:
    """How many parameters that must not move got a gradient in a step."""
    method(batches(1)[0])
    return sum(p.grad is not None for p in method.parameters() if not p.requires_grad)


def adapter_macs(features: int, classes: int) -> float:
    """Multiply-adds that an adapter adds to the prediction of one image."""
    head, h = nn.Linear(features, classes), torch.randn(1, features)
    adapted = AdaptedHead(head, busy_adapter(features, classes))
    with torch.no_grad():
        return count_macs(lambda: adapted(h)) - count_macs(lambda: head(h))


def model_macs(width: int, classes: int) -> float:
    """Multiply-adds of the prediction of one image."""
    net = models.create(BACKBONE, classes=classes, width=width).eval()
    with torch.no_grad():
        return count_macs(lambda: net(torch.rand(1, 3, SIZE, SIZE)))


def count_macs(run: Callable[[], object]) -> float:
    """Multiply-adds of matrix products and convolutions: half of torch's FLOPs."""
    # torch counts products of matrices, not of vectors
    of_vectors = {
        torch.ops.aten.mv: lambda matrix, *_, **__: 2 * matrix[0] * matrix[1],
        torch.ops.aten.dot: lambda vector, *_, **__: 2 * vector[0],
    }
    with FlopCounterMode(display=False, custom_mapping=of_vectors) as counter:
        run()
    return counter.get_total_flops() / 2


def passes_per_batch(method: Method) -> tuple[float, float]:
    """Images through the network and back, copies of it included, per image of the stream."""
    kind, stream, forwards, backwards = type(method.model), batches(), 0, 0
    method.reset()

    def back(grad: Tensor) -> None:
        nonlocal backwards
        backwards += len(grad)

    def seen(module: nn.Module, _: Any, output: Any) -> None:
        nonlocal forwards
        if isinstance(module, kind):
            forwards += len(output)
            if output.requires_grad:
                output.register_hook(back)

    handle = nn.modules.module.register_module_forward_hook(seen)
    try:
        for x in stream:
            method(x)
    finally:
        handle.remove()
    images = sum(map(len, stream))
    return forwards / images, backwards / images


class MethodCost(NamedTuple):
    """What a batch costs under a method; a plain forward is through the same network."""

    norm: str  # of its network
    ms: float  # median
    ratio: float  # to a plain forward, median
    forwards: float
    backwards: float
    peak_mb: float | None  # above what is there before the first batch; None outside Linux


def make_method(name: str) -> tuple[str, Method]:
    """A method on the BN network, or on the IABN one where it refuses BN; and which it is."""
    settings = REQUIRED.get(name, {})
    try:
        return "bn", methods.create(name, network("bn"), **settings)
    except ModelError:
        return "iabn", methods.create(name, network("iabn"), **settings)


def method_costs(rounds: int) -> dict[str, MethodCost]:
    """Time, passes and memory of every registered method."""
    made = {name: make_method(name) for name in methods.methods}
    plain = {f"forward {norm}": plain_forward(network(norm)) for norm in ("bn", "iabn")}
    live = {name: adapting(method) for name, (_, method) in made.items()}
    times = take_turns({**plain, **live}, rounds)
    peaks = peak_memory_of(list(made))
    costs = {}
    for name, (norm, method) in made.items():
        ms, ratio = 1e3 * median(times[name]), median(ratios(times, name, f"forward {norm}"))
        costs[name] = MethodCost(norm, ms, ratio, *passes_per_batch(method), peaks[name])
    return costs


def peak_memory_of(names: list[str]) -> dict[str, float | None]:
    """Peak memory of every method in MB, each in a process of its own."""
    context, peaks = get_context("spawn"), {}  # a fork would start with our memory
    for name in names:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            peaks[name] = pool.submit(peak_memory, name).result()
    return peaks


def peak_memory(name: str) -> float | None:
    """Peak memory of a method in MB above the start; run this in a fresh process."""
    if platform.system() != "Linux":
        return None
    torch.set_num_threads(THREADS)
    _, method = make_method(name)
    stream, before = batches(MEMORY_BATCHES), _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    for x in stream:
        method(x)
    # not ru_maxrss: a new process inherits it from the one that started it
    return _resident("VmHWM") - before


def _resident(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith(f"{key}:"))
    return int(kilobytes) / 1024


def tables(checks: list[Check], costs: dict[str, MethodCost]) -> list[Table]:
    """What is printed."""
    limits = Table("measured", "value", "limit", "", title="Limits", title_justify="left")
    for c in checks:
        value = f"{c.value:.4g}x" if c.unit == "x" else f"{c.value:,.0f} {c.unit}"
        spread = f" [{c.spread[0]:.3f}, {c.spread[1]:.3f}]" if c.spread else ""
        limit = "" if c.high is None else f"{f'{c.low:g} to' if c.low else 'at most'} {c.high:,.6g}"
        verdict = "" if c.high is None else "[green]pass[/]" if c.ok else "[red]FAIL[/]"
        limits.add_row(c.name, value + spread.replace("[", r"\["), limit, verdict)
    head = ("method", "network", "ms/batch", "/ forward", "forwards", "backwards", "peak MB")
    per_method = Table(*head, title="Methods, per batch", title_justify="left")
    for name, cost in costs.items():
        peak = "" if cost.peak_mb is None else f"{cost.peak_mb:.0f}"
        passes = (f"{cost.forwards:.2f}", f"{cost.backwards:.2f}")
        per_method.add_row(name, cost.norm, f"{cost.ms:.1f}", f"{cost.ratio:.2f}x", *passes, peak)
    return [limits, per_method]


def facts(rounds: int) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "network": f"{BACKBONE}, width {WIDTH}, channels last",
        "batch": [BATCH, 3, SIZE, SIZE],
        "threads": THREADS,
        "rounds": rounds,
        "versions": {"twoshift": twoshift.__version__, "torch": torch.__version__},
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
    }


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds: times are rough")] = False,
    out: Annotated[Path, typer.Option("--out", help="JSON file")] = Path("results/speed.json"),
) -> None:
    """Measure, print, write; exit code 1 if a limit is broken."""
    rounds = 6 if quick else 60
    torch.set_num_threads(THREADS)
    settings = facts(rounds)
    checks = [*count_checks(), *norm_checks(rounds), *tent_checks(rounds)]
    costs = method_costs(rounds // 2)
    console = Console(width=None if Console().is_terminal else 120)
    for table in tables(checks, costs):
        console.print(table)
    record = {
        "settings": settings,
        "checks": [{**asdict(c), "ok": c.ok} for c in checks],
        "methods": {name: cost._asdict() for name, cost in costs.items()},
    }
    try:
        write_json(out, record)
    except TwoshiftError as e:
        Console(stderr=True).print(f"{type(e).__name__}: {e}", style="red", markup=False)
        raise typer.Exit(2) from e
    if not all(c.ok for c in checks):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
