"""Any order of good and bad batches, resets, saves, loads and streams, found by hypothesis.

Beside a method there is a twin for each of its streams, which gets nothing but the good batches
and the resets. A case is a number of such sequences on one method; one that fails is shortened.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from torch import equal

from tests.fuzz.batches import BAD, build, configurations
from tests.fuzz.workers import Case
from tests.toys import make_batches, make_net
from twoshift.errors import TwoshiftError
from twoshift.methods import Method
from twoshift.testing import same

SEQUENCES, STEPS = 6, 20
OWN, STREAMS = "", ("camera 1", "camera 2")
NAMES = st.sampled_from([OWN, *STREAMS])


def prepare(folder: Path) -> Case:
    """See `tests.fuzz.workers`."""
    known = configurations()

    def try_one(rng: random.Random, case: int) -> Counter[str]:
        return sequences(*known[case * 29 % len(known)], rng.getrandbits(32), SEQUENCES)

    return try_one


def sequences(method: str, net: str, adapted: bool, seed: int, count: int) -> Counter[str]:
    """Try random sequences on a method; returns how often each step was taken."""
    happened = Counter[str]()

    @hypothesis.seed(seed)
    class Sequence(_Sequence):
        start = staticmethod(lambda: build(method, net, adapted))
        network, steps = net, happened

    run_state_machine_as_test(
        Sequence,
        settings=settings(
            max_examples=count,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        ),
    )
    return happened


class _Sequence(RuleBasedStateMachine):
    start: Any
    network: str
    steps: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.steps["sequences"] += 1
        self.live: Method = self.start()
        self.twins: dict[str, Method] = {OWN: self.start()}
        self.batches = make_batches(self.network)

    def of(self, name: str) -> Any:
        self.steps["steps"] += 1
        if name not in self.twins:
            self.twins[name] = self.start()
        return self.live.stream(name) if name else self.live

    @rule(name=NAMES, k=st.integers(0, 3))
    def good(self, name: str, k: int) -> None:
        logits, expected = (
            live(self.batches[k].clone()) for live in (self.of(name), self.twins[name])
        )
        assert equal(logits, expected)

    @rule(
        name=NAMES, k=st.integers(0, 3), kind=st.sampled_from(sorted(BAD)), seed=st.integers(0, 9)
    )
    def bad(self, name: str, k: int, kind: str, seed: int) -> None:
        stream, bad = self.of(name), BAD[kind](self.batches[k], random.Random(seed))
        try:
            stream(bad)
        except TwoshiftError:
            return
        raise AssertionError(f"{kind} was taken")

    @rule(name=NAMES)
    def reset(self, name: str) -> None:
        self.of(name).reset()
        self.twins[name].reset()

    @rule(name=NAMES)
    def restore(self, name: str) -> None:
        stream = self.of(name)
        stream.load_state(stream.state())

    @rule(name=NAMES)
    def save_and_load(self, name: str) -> None:
        stream = self.of(name)
        with tempfile.TemporaryDirectory() as folder:
            stream.save(folder)
            stream.reset()
            if name:
                stream.load(folder)
            else:
                stream.load_state(Method.load(folder, make_net(self.network)).state())

    @rule(name=st.sampled_from(STREAMS))
    def begin_anew(self, name: str) -> None:
        self.of(name).close()
        self.twins[name].reset()

    @rule(name=NAMES)
    def same_state(self, name: str) -> None:
        assert same(self.of(name).state(), self.twins[name].state())
