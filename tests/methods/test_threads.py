"""A method and its streams in use by many threads at once."""

import copy
import pickle
import subprocess
import sys
import threading

import pytest
import torch

from tests.toys import make_batches, make_method, make_net, same
from twoshift.methods import Method, Tent, methods
from twoshift.methods._streams import Lock

THREADS = 8

# in a process of its own: torch ends it where two threads use one graph
CODE = """
import tempfile, threading
from pathlib import Path
import torch
from tests.toys import make_batches, make_method, make_net
from twoshift.methods import Method, methods

def work(i, live, batches, first, folder):
    source = live if i % 2 else live.stream(f"camera-{i % 3}")
    mode = (torch.no_grad, torch.inference_mode, torch.enable_grad)[i % 3]
    for k in range(3):
        with mode():
            assert source(batches[(i + k) % len(batches)].clone()).isfinite().all()
        assert source.state().keys() >= first.keys()
        if i < 2:
            source.save(folder / str(i))
        if i == 2:
            live.reset()
        if i == 3:
            live.load_state(live.state())
        if i == 4:
            live.stream(f"short {k}")(batches[k].clone())
            live.drop(f"short {k}")

def guarded(problems, *args):
    try:
        work(*args)
    except BaseException as e:
        problems.append(f"{type(e).__name__}: {e}")

for name in methods:
    print(name, flush=True)
    net = "resnet_iabn" if name in ("iabn", "note") else "resnet_bn"
    batches, problems = make_batches(net), []
    live = make_method(name, make_net(net), True)
    with tempfile.TemporaryDirectory() as folder:
        args = (problems, live, batches, live.state(), Path(folder))
        threads = [
            threading.Thread(target=guarded, args=(args[0], i, *args[1:])) for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems, problems
        for i in range(2):
            restored = Method.load(Path(folder) / str(i), make_net(net))
            assert restored(batches[0]).isfinite().all()
    assert live(batches[0]).isfinite().all()
"""


def test_eight_threads_on_every_method():
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout} {done.stderr}"
    assert done.stdout.split() == list(methods)


def in_threads(*tasks):
    problems = []

    def guarded(task):
        try:
            task()
        except BaseException as e:
            problems.append(e)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems


def test_streams_in_threads_are_as_methods_of_their_own():
    """Whatever the order in which the threads get the network."""
    live = make_method("tent", make_net("mlp"), True)
    batches = make_batches("mlp", sizes=(4, 3, 5, 2), seed=3)
    streams = [live.stream(str(i)) for i in range(THREADS)]
    logits = [[] for _ in streams]

    def task(i):
        return lambda: logits[i].extend(streams[i](x.roll(i, 2)) for x in batches)

    in_threads(*(task(i) for i in range(THREADS)))
    for i in range(THREADS):
        alone = make_method("tent", make_net("mlp"), True)
        for x, seen in zip(batches, logits[i], strict=True):
            assert torch.equal(seen, alone(x.roll(i, 2)))
        assert same(streams[i].state(), alone.state())


def test_a_state_is_never_torn():
    """Weights move together: a state taken meanwhile is that of a moment between two batches."""

    class InStep(Tent):
        def adapt(self, x):
            scores = super().adapt(x)
            with torch.no_grad():
                for parameter in self._optimised():
                    parameter.add_(1.0)
                    parameter.mul_(0).add_(float(self.counted))
            self.counted += 1
            return scores

    live = InStep(make_net("resnet_bn"))
    live.counted = 0
    x, torn = make_batches("resnet_bn")[0], []

    def watch():
        for _ in range(200):
            state = live.state()
            values = {float(t.mean()) for n, t in state.items() if n.endswith(("weight", "bias"))}
            torn.extend([values] if live.counted and len(values) > 1 else [])

    live(x)
    in_threads(lambda: [live(x) for _ in range(15)], watch, watch)
    assert not torn


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda lock: pickle.loads(pickle.dumps(lock))])
def test_a_copied_lock_is_free_although_the_first_is_held(copied):
    lock = Lock()
    with lock:
        free = [enters(other) for other in (copied(lock), lock)]
    assert free == [True, False]


def enters(lock):
    """Whether another thread gets a lock at once."""
    entered = threading.Event()

    def enter():
        with lock:
            entered.set()

    threading.Thread(target=enter, daemon=True).start()
    return entered.wait(0.5)


def test_a_method_can_be_pickled():
    live = make_method("tent", make_net("mlp"), True)
    live.stream("a")(make_batches("mlp")[0])
    twin = pickle.loads(pickle.dumps(live))
    x = make_batches("mlp")[1]
    assert isinstance(twin, Method)
    assert twin.streams == ["a"]
    assert torch.equal(twin.stream("a")(x), live.stream("a")(x))
    assert torch.equal(twin(x), live(x))
