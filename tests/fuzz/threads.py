"""Eight threads on one method: streams of their own, and the method's own stream shared by all.

A case is one method. What each thread does on a stream of its own is done again afterwards, alone,
and must give the same logits and the same state, bit for bit.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from tests.fuzz.batches import build, configurations
from tests.fuzz.workers import Case
from tests.toys import make_batches, make_net
from twoshift.errors import TwoshiftError
from twoshift.methods import Method
from twoshift.methods._streams import LiveStream
from twoshift.testing import same

THREADS = 8
STEPS = 12
ACTIONS = ["batch"] * 5 + ["bad", "state", "save", "reset", "again"]
BESIDE = ["batch", "state", "save", "reset", "short", "restore", "bad"]


def prepare(folder: Path) -> Case:
    """See `tests.fuzz.workers`."""
    # each method on one network at a time, with an adapter
    known = [configuration for configuration in configurations() if configuration[2]]
    order = sorted(known, key=lambda c: sum(d[0] == c[0] for d in known[: known.index(c)]))

    def try_one(rng: random.Random, case: int) -> Counter[str]:
        return _together(*order[case % len(order)][:2], rng, folder / str(case))

    return try_one


def _together(method: str, net: str, rng: random.Random, folder: Path) -> Counter[str]:
    live, batches = build(method, net, True), make_batches(net)
    plans = [[rng.choice(ACTIONS) for _ in range(STEPS)] for _ in range(THREADS)]
    beside = [[rng.choice(BESIDE) for _ in range(STEPS)] for _ in range(THREADS)]
    streams = [live.stream(f"camera {i}") for i in range(THREADS)]
    logits: list[list[Tensor]] = [[] for _ in streams]
    problems: list[BaseException] = []

    def work(i: int) -> None:
        mode = (torch.no_grad, torch.inference_mode, torch.enable_grad)[i % 3]
        try:
            for step, (action, other) in enumerate(zip(plans[i], beside[i], strict=True)):
                with mode():
                    logits[i] += act(streams[i], action, batches, i + step, folder / str(i))
                    _beside(live, other, batches, i + step, folder / f"own {i}")
        except BaseException as e:
            problems.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    for i in range(THREADS):
        _alone(build(method, net, True), plans[i], batches, i, logits[i], streams[i], folder)
    saved = sorted(folder.iterdir()) if folder.exists() else []
    for path in saved:
        restored = Method.load(path, make_net(net))
        assert restored(batches[0]).isfinite().all()
    assert live(batches[0]).isfinite().all()
    calls = sum(len(found) for found in logits)
    return Counter({"methods x networks": 1, "calls": calls, "saved states loaded": len(saved)})


def act(
    stream: LiveStream[Method], action: str, batches: list[Tensor], k: int, folder: Path
) -> list[Tensor]:
    """One thing that is done to a stream; returns what it predicted, if anything."""
    x = batches[k % len(batches)].clone()
    match action:
        case "batch":
            return [stream(x)]
        case "bad":
            try:
                stream(x * float("nan"))
            except TwoshiftError:
                return []
            raise AssertionError("NaN was taken")
        case "state":
            stream.state()
        case "save":
            stream.save(folder)
        case "reset":
            stream.reset()
        case "again":
            stream.load_state(stream.state())
    return []


def _beside(live: Method, action: str, batches: list[Tensor], k: int, folder: Path) -> None:
    """One thing that is done to the method's own stream, in any order."""
    x = batches[k % len(batches)].clone()
    match action:
        case "batch":
            assert live(x).isfinite().all()
        case "state":
            live.state()
        case "save":
            live.save(folder)
        case "reset":
            live.reset()
        case "restore":
            live.load_state(live.state())
        case "short":
            name = f"short {threading.get_ident()}"
            assert live.stream(name)(x).isfinite().all()
            live.drop(name)
        case "bad":
            try:
                live(x[0])
            except TwoshiftError:
                return
            # a network that flattens may take it


def _alone(
    live: Method,
    plan: list[str],
    batches: list[Tensor],
    i: int,
    logits: list[Tensor],
    stream: LiveStream[Method],
    folder: Path,
) -> None:
    again: list[Tensor] = []
    alone = live.stream(f"camera {i}")
    for step, action in enumerate(plan):
        if action != "save":
            again += act(alone, action, batches, i + step, folder)
    assert len(again) == len(logits)
    assert all(a.equal(b) for a, b in zip(again, logits, strict=True)), "other logits than alone"
    assert same(alone.state(), stream.state()), "another state than alone"
