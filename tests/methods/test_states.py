"""States that do not fit: each refused whole, before anything is copied."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from tests.toys import CLASSES, make_adapter, make_batches, make_method, make_net, same
from twoshift import storage
from twoshift.adapters import attach
from twoshift.errors import MismatchError, TwoshiftWarning
from twoshift.estimators import EM, EMA, DecayedCounts
from twoshift.methods import LabelAware, Matched, Method, Source, Tent, methods
from twoshift.models.identity import same_sketch, sketch


def run(name, net, adapted=True, **settings):
    live = make_method(name, make_net(net), adapted, **settings)
    for x in make_batches(net):
        live(x)
    return live


def assert_refused(live, state, match="state"):
    before = live.state()
    with pytest.raises(MismatchError, match=match):
        live.load_state(state)
    assert same(live.state(), before)


def first(state, end):
    return next(n for n in state if n.endswith(end))


def test_a_moment_of_another_shape_does_not_reach_the_fused_kernel():
    """It would write out of bounds: the process itself is at stake."""
    code = """
import torch
from tests.toys import make_batches, make_method, make_net
from twoshift.errors import MismatchError
live = make_method("tent", make_net("resnet_bn"), False)
x = make_batches("resnet_bn")[0]
live(x)
state = live.state()
try:
    live.load_state({**state, "optimizer.0.exp_avg": torch.zeros(1)})
except MismatchError:
    print("refused")
for _ in range(20):
    live(x)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused\n"


@pytest.mark.parametrize(
    ("end", "change"),
    [
        ("exp_avg", lambda t: torch.zeros(1)),
        ("exp_avg", lambda t: t[:-1]),
        ("exp_avg", lambda t: t.long()),
        ("exp_avg", lambda t: t * float("nan")),
        ("exp_avg_sq", lambda t: t - 1),
        ("step", lambda t: torch.zeros(2)),
        ("step", lambda t: t * float("inf")),
        ("step", lambda t: t - 100),
        ("step", lambda t: t.long()),
        ("step", lambda t: t.half()),
        ("weight", lambda t: t * float("inf")),
        ("weight", lambda t: t.long()),
        ("weight", lambda t: t.to(torch.complex64)),
        ("generator", lambda t: t[:-1]),
        ("generator", lambda t: torch.full_like(t, 255)),
        ("generator", lambda t: t.float()),
        ("prior", lambda t: t.to("meta")),
        ("prior", lambda t: t.to_sparse()),
        ("prior", lambda t: t.tolist()),
        ("prior", lambda t: np.asarray(t)),
        ("estimator.weight", lambda t: t + 7),
        ("estimator.weight", lambda t: t.double()),
        ("estimator.seen", lambda t: -t),
        ("estimator.seen", lambda t: t.to("meta")),
    ],
)
def test_every_entry_is_checked(end, change):
    live = run("tent", "resnet_bn")
    state = live.state()
    name = first(state, end)
    assert_refused(live, {**state, name: change(state[name])})


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.0.exp_avg_new",
        "optimizer.999.exp_avg",
        "optimizer.-1.exp_avg",
        "optimizer.00.exp_avg",
        "optimizer.x.exp_avg",
        "optimizer.0",
        "optimizer.0.momentum_buffer",
        "memory.images",
        "something",
        "model.conv1.weight",
        "estimator.more",
    ],
)
def test_unknown_entries_are_refused(name):
    live = run("tent", "resnet_bn")
    assert_refused(live, {**live.state(), name: torch.zeros(4)})


def test_half_of_the_moments_is_refused():
    live = run("tent", "resnet_bn")
    state = live.state()
    del state[first(state, "exp_avg_sq")]
    assert_refused(live, state, "complete, with exp_avg_sq")


def test_moments_of_a_method_without_optimiser_are_refused():
    live = Source(make_net("mlp"))
    assert_refused(live, {**live.state(), "optimizer.0.exp_avg": torch.zeros(4)})


@pytest.mark.parametrize("state", [None, [], {1: torch.zeros(1)}, "state"])
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapter"])
def test_no_dictionary_of_tensors(state, adapted):
    assert_refused(make_method("tent", make_net("mlp"), adapted), state)


@pytest.mark.parametrize("net", ["resnet_bn", "resnet_iabn"])
def test_negative_variances_are_refused(net):
    live = run("onda", net, False)
    state = live.state()
    name = first(state, "running_var")
    assert_refused(live, {**state, name: state[name] - 100}, "at least 0")


MEMORIES = {
    "note": ("resnet_iabn", "images", {"classes": -1, "arrivals": -1}),
    "rotta": ("resnet_bn", "images", {"label": CLASSES, "born": 10**9}),
    "onda": ("resnet_bn", "waiting", {}),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_memories_are_checked(name):
    net, images, facts = MEMORIES[name]
    live = run(name, net)
    state = live.state()
    stored = state[f"memory.{images}"]
    for bad in (
        stored[0],
        stored[:, :1],
        stored.long(),
        stored * float("nan"),
        stored[:0],
        torch.cat([stored] * 9),
        stored * 1e20,
    ):
        assert_refused(live, {**state, f"memory.{images}": bad})
    for fact, value in facts.items():
        entry = f"memory.{fact}"
        assert_refused(live, {**state, entry: torch.full_like(state[entry], value)})
        assert_refused(live, {**state, entry: state[entry][1:]})
        assert_refused(live, {**state, entry: state[entry].float()})
        assert_refused(live, {n: t for n, t in state.items() if n != entry})
    assert_refused(live, {**state, "memory.others": stored})
    live.load_state({n: t for n, t in state.items() if not n.startswith("memory.")})
    assert not live.method.memory


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapter"])
def test_the_matched_counts_are_not_negative(adapted):
    live = run("matched", "resnet_bn", adapted)
    state = live.state()
    assert_refused(live, {**state, "counts": state["counts"] - 50}, "at least 0")


@pytest.mark.parametrize(
    ("make", "entry", "value"),
    [
        (EM, "count", -1.0),
        (EM, "count", 513.0),
        (EM, "count", 0.5),
        (EM, "rows", -0.1),
        (EM, "estimate", 0.0),
        (EM, "estimate", 1.0),
        (DecayedCounts, "counts", -0.5),
        (EMA, "weight", -0.5),
    ],
)
def test_impossible_estimates_are_refused(make, entry, value):
    estimator = make(CLASSES)
    estimator.update(torch.eye(CLASSES))
    state = estimator.state()
    with pytest.raises(MismatchError):
        estimator.load_state({**state, entry: torch.full_like(state[entry], value)})
    assert same(estimator.state(), state)


def test_infinity_is_a_value_where_it_was_one_at_first():
    """SAR averages nothing before its first step, and masks of attention are often infinite."""

    class Masked(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Flatten(), nn.Linear(192, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
            self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))

    live = make_method("sar", Masked(), False)
    state = live.state()
    live.load_state(state)
    assert same(live.state(), state)
    assert_refused(live, {**state, "model.mask": state["model.mask"].flip(0)}, "finite")
    assert_refused(live, {**state, "average": torch.tensor(float("nan"))}, "finite")


def test_a_state_holds_only_what_moves():
    net = make_net("resnet_bn")
    assert set(Tent(net, freeze=["layer2", "layer3", "layer4"]).state()) == {
        "generator",
        *(f"model.{n}" for n, p in net.named_parameters() if "bn" in n and "layer1" in n),
        *(f"model.{n}" for n in ("bn1.weight", "bn1.bias")),
    }
    live = run("matched", "resnet_bn")
    assert {n for n in live.state() if "estimator" not in n} == {
        "model.fc.prior",
        "counts",
        "generator",
    }


@pytest.mark.parametrize("name", ["tent", "matched", "bn_stats", "cotta", "eata"])
def test_a_state_with_what_never_moves_is_taken_if_it_is_this_models(name):
    """As 0.1.0 wrote it."""
    live = run(name, "resnet_bn")
    state, fixed = live.state(), live.method._fixed()
    assert "model.bn1.running_mean" in fixed
    assert "model.normalize.mean" in fixed
    assert "model.fc.adapter.mapping" in fixed
    assert not fixed.keys() & state.keys()
    live.load_state({**fixed, **state})
    assert same(live.state(), state)
    moved = {**fixed, "model.bn1.running_mean": fixed["model.bn1.running_mean"] + 1}
    assert_refused(live, {**moved, **state}, "never moves")


def test_the_fingerprint_is_over_what_never_moves_too():
    """As in 0.1.0, so that its states are still recognised."""
    live = make_method("tent", make_net("resnet_bn"), False)
    everything = {**dict(live.named_parameters()), **dict(live.named_buffers())}
    expected = storage.fingerprint({**everything, "generator": live.generator.get_state()})
    assert live.origin() == expected
    live(make_batches("resnet_bn")[0])
    assert live.origin() == expected


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def stateful(dtype):
    """A method that has moved, in a certain precision."""
    net = make_net("mlp").to(dtype)
    live = LabelAware(Tent(attach(net, make_adapter(net))), EMA(CLASSES))
    live(make_batches("mlp")[0].to(dtype))
    return live


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_states_move_between_precisions_with_a_warning(dtype, tmp_path):
    live = stateful(torch.float32)
    other = stateful(dtype)
    with pytest.warns(TwoshiftWarning, match="rounded from float32 to") as record:
        other.load_state(live.state())
    assert len(record) == 1
    assert other.state().keys() == live.state().keys()
    for name, value in other.state().items():
        expected = live.state()[name]
        torch.testing.assert_close(value.to(expected), expected, rtol=0.01, atol=1e-4)
    live.save(tmp_path / "s")
    with pytest.warns(TwoshiftWarning, match="rounded") as record:
        restored = Method.load(tmp_path / "s", make_net("mlp").to(dtype))
    assert len(record) == 1
    x = make_batches("mlp")[1]
    torch.testing.assert_close(restored(x.to(dtype)).float(), live(x), rtol=0.2, atol=0.2)
    restored.reset()
    restored.save(tmp_path / "t")
    with pytest.warns(TwoshiftWarning, match="rounded"):
        Method.load(tmp_path / "t", make_net("mlp"))


def test_another_model_in_another_precision_is_refused(tmp_path):
    stateful(torch.float32).save(tmp_path / "s")
    with pytest.raises(MismatchError, match="another model"):
        Method.load(tmp_path / "s", make_net("mlp", seed=1).double())
    nearly = make_net("mlp").double()
    with torch.no_grad():
        nearly.head.weight.mul_(1.05)
    with pytest.raises(MismatchError, match="another model"):
        Method.load(tmp_path / "s", nearly)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sketch_survives_rounding_and_nothing_else(dtype):
    weights = make_net("resnet_bn").state_dict()
    drawn = sketch(weights)
    rounded = {n: t.to(dtype) if t.is_floating_point() else t for n, t in weights.items()}
    assert same_sketch(drawn, sketch(rounded))
    assert not same_sketch(drawn, sketch(make_net("resnet_bn", seed=1).state_dict()))
    assert not same_sketch(drawn, sketch({n: t for n, t in weights.items() if n != "fc.bias"}))
    assert not same_sketch(drawn, sketch({**weights, "fc.bias": weights["fc.bias"] * 1.1}))
    for other in (None, "", drawn[:-4], drawn[:-1] + "x", 3):
        assert not same_sketch(drawn, other)


def test_moments_take_the_layout_of_their_weights(tmp_path):
    """A file stores values row by row; the fused kernel reads both by the weight's own layout."""
    net = make_net("resnet_bn").to(memory_format=torch.channels_last)
    live = make_method("cotta", net, False)
    first, second = make_batches("resnet_bn")[:2]
    live(first)
    live.save(tmp_path / "s")
    restored = Method.load(tmp_path / "s", net)
    assert torch.equal(restored(second), live(second))
    assert same(restored.state(), live.state())


def test_a_copy_is_independent():
    live = run("tent", "mlp")
    twin = copy.deepcopy(live)
    x = make_batches("mlp")[0]
    assert torch.equal(twin(x), live(x))
    twin(x)
    assert not same(twin.state(), live.state())
    assert twin._streams.lock is not live._streams.lock


def test_every_method_knows_what_it_remembers(case):
    live = case.build()
    case.run(live)
    inner = live.method if isinstance(live, LabelAware) else live
    assert inner.memory.keys() <= inner.remembers.keys()
    assert type(inner) in [methods[name] for name in methods]
    live.load_state(live.state())


def test_matched_is_light():
    live = make_method("matched", make_net("resnet_bn"), True)
    assert isinstance(live.method, Matched)
    assert sum(t.nbytes for t in live.state().values()) < 10_000
