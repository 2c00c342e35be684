"""What methods cost: ``python -m benchmarks.speed [--quick] [--out FILE]``.

Times are compared within one run only. The candidates of a comparison take turns, and each round
starts with another one. The value is the median over rounds of the ratio within a round, because
whatever slows the machine down for a second slows down both sides. A limit is broken if even the
lower quartile of these ratios is above it.

Images are generated: corrupted photographs. The network is not trained, but its head is centred on
them, so that all classes are predicted: methods with a memory fill it, as they do in use.

Memory is measured by the operating system: the peak resident size of a fresh process while it
adapts to a few batches, minus its size with the model built, before the first batch. Unlike torch's
own count it includes the scratch space of the convolutions. It needs Linux.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn

import twoshift
from benchmarks.exported import by_onnxruntime, exported, missing
from benchmarks.photographs import corrupted_batches
from benchmarks.speed_report import Out, Quick, finish
from benchmarks.timing import Candidate, Check, milliseconds, ratios, resident, take_turns, timed
from twoshift import Calibration, estimators, methods, models
from twoshift.adapters import AdaptedHead, LabelShiftAdapter, attach
from twoshift.bench.cost import cost, count_macs, parameters
from twoshift.errors import ModelError
from twoshift.estimators import EMA
from twoshift.methods import NOTE, LabelAware, Method, Tent
from twoshift.methods._learning import entropy
from twoshift.methods.eata import fisher_information
from twoshift.models.head import find_head
from twoshift.models.norm import batch_norms
from twoshift.registry import signature_settings

BACKBONE, WIDTH, BATCH, SIZE, THREADS = "resnet18_cifar", 16, 64, 32, 2
EXPECTED_PARAMETERS, PAPER_MACS = 0.124e6, 0.11e6  # of the adapter, with d = 512 and C = 100
MEMORY_BATCHES = 8
LOGITS = 4.0  # spread of the logits of a class, as in trained networks: sure of most images
# what recommended may cost of a plain forward pass: width, images in a batch, threads -> limit.
# Only one thread can be useful for a single image, except within its convolutions.
RECOMMENDED = {(16, 64, 2): 1.35, (64, 64, 2): 1.15, (16, 1, 1): 1.7, (16, 1, 2): None}
ESTIMATORS = ("em", "paced")
ESTIMATE_MS = {10: 0.5, 1000: 20.0}  # of a batch, by classes

# rows with other settings than the defaults: row -> method, settings
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cotta, anchor sure": ("cotta", {"confidence_threshold": 0.0}),
    "cotta, anchor unsure": ("cotta", {"confidence_threshold": 1.0}),
    "dart": ("dart", {}),
    "dart, tent": ("dart", {"method": "tent"}),
    "hybrid_ttn, batch": ("hybrid_ttn", {}),
    "hybrid_ttn, classes": ("hybrid_ttn", {"score": "classes"}),
    # every image passes their filters, so that the cost of a step is measured
    "eata": ("eata", {"fisher_weight": 0.0, "margin": 1.0, "redundancy": 1.1}),
    "sar": ("sar", {"margin": 1.0, "recover_below": None}),
    "tribe": ("tribe", {"margin": 1.0}),
}


def network(norm: str = "bn", classes: int = 10, width: int | None = None) -> nn.Module:
    """The network that is timed: channels last, in evaluation mode, all classes predicted."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = models.create(BACKBONE, classes=classes, width=width or WIDTH, norm=norm)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return centred(net.eval())


@torch.no_grad()
def centred(net: nn.Module) -> nn.Module:
    """Make the logits of every class equally large over the images: none is always the first."""
    _, head = find_head(net)
    assert isinstance(head, nn.Linear)
    logits = torch.cat([net(x) for x in batches(2)])
    scale = LOGITS / logits.std(0)
    head.weight *= scale[:, None]
    head.bias.sub_(logits.mean(0)).mul_(scale)
    return net


def batches(count: int = 4, size: int | None = None) -> tuple[Tensor, ...]:
    """Corrupted photographs, channels last."""
    return corrupted_batches(count, size or BATCH, SIZE)


def plain_forward(net: nn.Module, size: int | None = None) -> Candidate:
    """Prediction without adaptation, the baseline of all comparisons."""
    feed = itertools.cycle(batches(size=size))
    return Candidate(torch.no_grad()(lambda: net(next(feed))))


def training(net: nn.Module, backward: bool) -> Candidate:
    """A forward pass in training mode, optionally with a backward pass through all weights."""
    net, feed = copy.deepcopy(net).train(), itertools.cycle(batches())

    def run() -> None:
        net.zero_grad(set_to_none=True)
        loss = net(next(feed)).logsumexp(1).mean()
        if backward:
            loss.backward()

    return Candidate(run)


def adapting(method: Method, size: int | None = None) -> Candidate:
    """A method that adapts to its stream, of which it has seen hundreds of images at first."""
    feed = itertools.cycle(batches(size=size))

    def start() -> None:
        method.reset()
        for x in batches(8) if size else ():
            method(x)

    return Candidate(lambda: method(next(feed)), start)


def bare_step(tent: Tent) -> Candidate:
    """What of TENT cannot be left out: the passes and the step, nothing checked or kept."""
    feed, optimizer = itertools.cycle(batches()), tent.optimizer
    assert optimizer is not None

    def run() -> None:
        loss = entropy(tent.model(next(feed))).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return Candidate(run, tent.reset)


def busy_adapter(features: int, classes: int) -> LabelShiftAdapter:
    """An adapter with random weights; a new one is the identity, and zeros may be cheap."""
    adapter = LabelShiftAdapter(features, classes)
    g = torch.Generator().manual_seed(2)
    for parameter in adapter.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g) * 0.05
    return adapter.eval()


def norm_checks(rounds: int) -> list[Check]:
    """Compare IABN with BN in the same network."""
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
    """Compare TENT with a plain forward pass and a bare step, and TENT + adapter with TENT."""
    net = network()
    live = {"tent": adapting(Tent(net)), "bare": bare_step(Tent(net))}
    times = take_turns({"forward": plain_forward(net), **live}, rounds)
    checks = [
        # In forward passes, by CPU time of one thread: batch statistics 1.08, keeping the graph
        # 0.07, the backward pass 1.21 (its convolutions 0.85), the step 0.03. That is torch's;
        # ours, the next row, is checking batch and loss and the copy of the state: 0.01.
        timed("TENT / forward", times, "tent", "forward", 2.5),
        timed("TENT / its passes and step alone", times, "tent", "bare", 1.05),
    ]
    for classes in (10, 100):
        net = network(classes=classes)
        adapted = Tent(attach(net, busy_adapter(8 * WIDTH, classes)))
        pair = {"tent": Tent(net), "adapted": LabelAware(adapted, EMA(classes))}
        # a limit of 5 % needs a more precise median
        times = take_turns({name: adapting(method) for name, method in pair.items()}, 2 * rounds)
        checks.append(timed(f"TENT + adapter / TENT, C={classes}", times, "adapted", "tent", 1.05))
    return checks


def baseline_checks(rounds: int) -> list[Check]:
    """Compare other methods with a plain forward pass or with TENT."""
    net, iabn = network(), network("iabn")
    fisher = {"fisher": fisher_information(net, batches(2)), "fisher_weight": 1.0}
    live = {name: adapting(make_method(name)[1]) for name in ("onda", "lame", "sar", "delta")}
    live["cotta"] = adapting(make_method("cotta, anchor sure")[1])
    live["recommended"] = adapting(twoshift.recommended(net, calibrated(net, 10, SIZE)))
    live["eata"] = adapting(methods.create("eata", net, **(VARIANTS["eata"][1] | fisher)))
    plain = {"forward": plain_forward(net), "tent": adapting(Tent(net))}
    times = take_turns({**plain, **live}, rounds)
    times |= take_turns({"iabn": plain_forward(iabn), "note": adapting(NOTE(iabn))}, rounds)
    return [
        timed("NOTE / IABN forward", times, "note", "iabn", 4.0),
        timed("ONDA / forward", times, "onda", "forward", 3.0),
        # In forward passes: anchor and teacher 2.14, the student's pass 1.28 and its backward pass
        # with all weights 2.20, random draws that restore weights 0.10, optimiser 0.04, teacher
        # 0.01; ours are the copy of the state, 0.04, and looking for overflow, 0.01.
        timed("CoTTA / forward, anchor sure", times, "cotta", "forward", 6.5),
        timed("LAME / forward", times, "lame", "forward", 1.3),
        timed("SAR / TENT", times, "sar", "tent", 2.2),
        timed("DELTA / TENT", times, "delta", "tent", 1.3),
        timed("EATA / TENT", times, "eata", "tent", 1.1),
        timed("recommended / TENT", times, "recommended", "tent", 2.6),
    ]


def recommended_checks(rounds: int) -> list[Check]:
    """Compare what is recommended with a plain forward pass, by width and size of the batches."""
    checks = []
    for (width, size, threads), high in RECOMMENDED.items():
        net = network(width=width)
        live = twoshift.recommended(net, calibrated(net, 10, SIZE))
        pair = {"forward": plain_forward(net, size), "recommended": adapting(live, size)}
        what = f"recommended / forward, width {width}, batches of {size}, {threads} threads"
        torch.set_num_threads(threads)
        checks.append(timed(what, take_turns(pair, rounds), "recommended", "forward", high))
    torch.set_num_threads(THREADS)
    return checks


def exported_checks(rounds: int) -> list[Check]:
    """Compare onnxruntime, on what is recommended as an ONNX file, with torch; none without it."""
    if lacks := missing():
        typer.echo(
            f"onnxruntime was not timed: no {', '.join(lacks)}; see twoshift[onnx]", err=True
        )
        return []
    net, checks = network(), []
    live = twoshift.recommended(net, calibrated(net, 10, SIZE))
    for x in batches():
        live(x)
    session = exported(live, batches(1)[0])
    for size in (BATCH, 1):
        stream = batches(size=size)
        candidates = {
            "forward": plain_forward(net, size),
            "recommended": adapting(live, size),
            "onnxruntime": by_onnxruntime(session, stream, labels=False),
            "with labels": by_onnxruntime(session, stream, labels=True),
        }
        times, of = take_turns(candidates, rounds), f"batches of {size}"
        for what, name, to in (
            ("onnxruntime / forward", "onnxruntime", "forward"),
            ("onnxruntime with label estimate / recommended", "with labels", "recommended"),
        ):
            checks.append(timed(f"{what}, {of}", times, name, to, None))
    return checks


def estimate_checks(rounds: int, names: Sequence[str] = ESTIMATORS) -> list[Check]:
    """The time of a label estimate per batch, once it has seen many.

    Args:
        rounds: Batches to time.
        names: Registered names of estimators that need no facts of a source model.
    """
    checks = []
    for name, (classes, high) in itertools.product(names, ESTIMATE_MS.items()):
        update = estimating(name, classes)
        times = take_turns({name: update}, rounds)
        checks.append(milliseconds(f"label estimate {name}, C={classes}", times[name], high))
    return checks


def estimating(name: str, classes: int) -> Candidate:
    """An estimator that has seen enough batches to fill a window."""
    g = torch.Generator().manual_seed(4)
    logits = LOGITS * torch.randn(8, BATCH, classes, generator=g)
    feed, estimator = itertools.cycle(logits.softmax(2)), estimators.create(name, classes)
    for _ in range(2 * len(logits)):
        estimator.update(next(feed))
    return Candidate(lambda: estimator.update(next(feed)))


def count_checks() -> list[Check]:
    """Count parameters, multiply-adds and gradients, which are the same on every machine."""
    small = parameters(LabelShiftAdapter(512, 100))
    large = parameters(LabelShiftAdapter(2048, 1000))
    added, total = adapter_macs(512, 100), cost(BACKBONE, {"width": 64}, 100, SIZE).macs
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
        # with gradients of all weights it would be three
        Check("TENT MACs / forward MACs", tent_ratio, high=2.0),
    ]


def frozen_gradients(method: Method) -> int:
    """The number of frozen parameters that got a gradient in a step."""
    method(batches(1)[0])
    return sum(p.grad is not None for p in method.parameters() if not p.requires_grad)


def adapter_macs(features: int, classes: int) -> float:
    """Multiply-adds that an adapter adds to the prediction of one image."""
    head, h = nn.Linear(features, classes), torch.randn(1, features)
    adapted = AdaptedHead(head, busy_adapter(features, classes))
    with torch.no_grad():
        return count_macs(lambda: adapted(h)) - count_macs(lambda: head(h))


def passes_per_batch(method: Method) -> tuple[float, float]:
    """Forward and backward passes of the network and its copies, per image of the stream."""
    kind, stream = type(method.model), batches()
    forwards, backwards = list[int](), list[int]()  # images of each pass
    method.reset()

    def count(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(module, kind):
            forwards.append(len(output))
            if output.requires_grad:
                output.register_hook(lambda grad: backwards.append(len(grad)))

    with nn.modules.module.register_module_forward_hook(count):
        for x in stream:
            method(x)
    images = sum(map(len, stream))
    return sum(forwards) / images, sum(backwards) / images


class MethodCost(NamedTuple):
    """What a batch costs under a method.

    Attributes:
        norm: Normalisation layers of the network.
        ms: Median milliseconds.
        ratio: Median ratio to a plain forward pass of the same network.
        forwards: Forward passes per image.
        backwards: Backward passes per image.
        peak_mb: Peak memory in MB above that before the first batch; None except on Linux.
    """

    norm: str
    ms: float
    ratio: float
    forwards: float
    backwards: float
    peak_mb: float | None


def rows() -> list[str]:
    """Every registered method, or its variants if it has any."""
    with_variants = {method for method, _ in VARIANTS.values()}
    return sorted([*VARIANTS, *(name for name in methods.methods if name not in with_variants)])


def make_method(row: str) -> tuple[str, Method]:
    """The norm of the network, BN unless the method refuses it and IABN then, and the method."""
    name, settings = VARIANTS.get(row, (row, {}))
    if name == "dart":
        settings = {**settings, "dart": no_refinement()}
    elif "moments" in signature_settings(methods.methods[name]):
        settings = {"moments": moments(), **settings}
    try:
        return "bn", methods.create(name, network("bn"), **settings)
    except ModelError:
        return "iabn", methods.create(name, network("iabn"), **settings)


def moments() -> dict[str, Any]:
    """Constant moments for matched statistics: their values cost nothing."""
    layers = batch_norms(network())
    return {n: [[[v] * layer.num_features] * 10 for v in (0.0, 1.0)] for n, layer in layers}


def no_refinement(classes: int = 10, hidden: int = 1000) -> dict[str, Tensor]:
    """DART's network of its usual size; its values cost nothing."""
    out = classes**2 + classes
    return {
        "hidden_weight": torch.zeros(hidden, classes + 1),
        "hidden_bias": torch.zeros(hidden),
        "out_weight": torch.zeros(out, hidden),
        "out_bias": torch.zeros(out),
    }


def calibrated(net: nn.Module, classes: int, size: int) -> Calibration:
    """A calibration by random images, equally many of every class.

    Temperature and bias are none: those of noise would make an estimate of the labels cheap.
    """
    g = torch.Generator().manual_seed(3)
    labels = torch.randperm(classes * max(1, BATCH // classes), generator=g) % classes
    pairs = [(torch.rand(len(y), 3, size, size, generator=g), y) for y in labels.split(BATCH)]
    facts = twoshift.calibrate(net, pairs, source_prior="uniform")
    bias = torch.zeros(classes, dtype=torch.float64)
    return replace(facts, running={**facts.running, "temperature": 1.0, "bias": bias})


def method_costs(rounds: int) -> dict[str, MethodCost]:
    """Time, passes and memory of every registered method."""
    candidates = {row: make_method(row) for row in rows()}
    plain = {f"forward {norm}": plain_forward(network(norm)) for norm in ("bn", "iabn")}
    live = {name: adapting(method) for name, (_, method) in candidates.items()}
    times = take_turns({**plain, **live}, rounds)
    peaks = peak_memory_of(list(candidates))
    costs = {}
    for name, (norm, method) in candidates.items():
        ms, ratio = 1e3 * median(times[name]), median(ratios(times, name, f"forward {norm}"))
        costs[name] = MethodCost(norm, ms, ratio, *passes_per_batch(method), peaks[name])
    return costs


def peak_memory_of(names: list[str]) -> dict[str, float | None]:
    """Peak memory of every method in MB, each in a process of its own."""
    context, peaks = get_context("spawn"), {}  # a fork would inherit our memory
    for name in names:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            peaks[name] = pool.submit(peak_memory, name).result()
    return peaks


def peak_memory(name: str) -> float | None:
    """Peak memory of a method in MB above the start; call this in a fresh process."""
    if platform.system() != "Linux":
        return None
    torch.set_num_threads(THREADS)
    _, method = make_method(name)
    stream = batches(MEMORY_BATCHES)
    ctypes.CDLL(None).malloc_trim(0)  # what was needed to build the network is not counted
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    for x in stream:
        method(x)
    return resident("VmHWM") - before


def conditions(rounds: int) -> dict[str, Any]:
    """The conditions that the numbers depend on."""
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


Estimators = Annotated[list[str], typer.Option("--estimator", help="Label estimate to time")]


def main(
    quick: Quick = False,
    out: Out = Path("results/speed.json"),
    names: Estimators = list(ESTIMATORS),  # noqa: B006  only read
) -> None:
    """Measure, print and write; the exit code is 1 if a limit is broken."""
    rounds = 6 if quick else 60
    torch.set_num_threads(THREADS)
    settings = conditions(rounds)
    checks = [*count_checks(), *norm_checks(rounds), *tent_checks(rounds), *baseline_checks(rounds)]
    checks += [*recommended_checks(rounds), *exported_checks(rounds)]
    checks += estimate_checks(rounds, names)
    costs = {name: cost._asdict() for name, cost in method_costs(rounds // 2).items()}
    finish(out, checks, settings=settings, methods=costs)


if __name__ == "__main__":
    typer.run(main)
