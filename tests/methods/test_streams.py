"""Many streams over one network."""

import copy

import pytest
import torch

from tests.toys import CLASSES, make_adapter, make_batches, make_method, make_net, same
from twoshift import estimators
from twoshift.adapters import attach
from twoshift.errors import (
    BatchError,
    CheckpointError,
    InputError,
    MismatchError,
    ModelError,
    UnknownName,
)
from twoshift.estimators import EM, EMA
from twoshift.methods import LabelAware, Method, Source, Tent

BATCHES = make_batches("mlp")


@pytest.fixture
def live():
    return make_method("tent", make_net("mlp"), True)


def test_the_same_name_is_the_same_stream(live):
    a = live.stream("a")
    assert live.stream("a") is a
    assert a.name == "a"
    assert live.stream("b") is not a
    assert live.streams == ["a", "b"]
    assert repr(a) == "<stream 'a' of LabelAware>"


@pytest.mark.parametrize("name", ["", None, 7, b"a"])
def test_names_are_strings(live, name):
    with pytest.raises(InputError, match="name of a stream"):
        live.stream(name)
    assert live.streams == []


def test_a_new_stream_starts_where_reset_returns_to(live):
    start = live.state()
    live(BATCHES[0])
    a = live.stream("a")
    assert same(a.state(), start)
    first = a(BATCHES[0])
    a(BATCHES[1])
    a.reset()
    assert same(a.state(), start)
    assert torch.equal(a(BATCHES[0]), first)


def test_the_method_is_a_stream_of_its_own(live):
    other = make_method("tent", make_net("mlp"), True)
    a = live.stream("a")
    for x in BATCHES:
        a(x.flip(0))
        assert torch.equal(live(x), other(x))
        a(x)
        assert torch.equal(live.prior, other.prior)
        assert not torch.equal(a.prior, live.prior)
        assert same(live.state(), other.state())
    a.reset()
    assert same(live.state(), other.state())
    live.reset()
    a(BATCHES[0])
    other.reset()
    assert same(live.state(), other.state())


def test_what_a_stream_reads_and_loads_is_its_own(live):
    a, b = live.stream("a"), live.stream("b")
    a(BATCHES[0])
    saved = a.state()
    b(BATCHES[1])
    before = b.state()
    a(BATCHES[2])
    a.load_state(saved)
    assert same(a.state(), saved)
    assert same(b.state(), before)
    b.load_state(saved)
    assert torch.equal(b(BATCHES[3]), a(BATCHES[3]))
    with pytest.raises(MismatchError):
        a.load_state({})
    with pytest.raises(BatchError):
        a(BATCHES[0] * float("nan"))
    assert same(b.state(), a.state())


def test_streams_may_change_places_through_a_folder(live, tmp_path):
    a = live.stream("a")
    for x in BATCHES[:2]:
        a(x)
        live(x.flip(0))
    a.save(tmp_path / "a")
    b = live.stream("b")
    b.load(tmp_path / "a")
    alone = Method.load(tmp_path / "a", make_net("mlp"))
    assert same(alone.state(), a.state())
    for x in BATCHES[2:]:
        expected = a(x)
        assert torch.equal(b(x), expected)
        assert torch.equal(alone(x), expected)
    alone.save(tmp_path / "alone")
    b.load(tmp_path / "alone")
    assert same(b.state(), a.state())


def others():
    net = make_net("mlp")
    adapted = attach(net, make_adapter(net))
    settings = {"lr": 0.02}
    yield "method", LabelAware(Source(adapted), EMA(CLASSES, alpha=0.3))
    yield "lr of the method", LabelAware(Tent(adapted, lr=0.5), EMA(CLASSES, alpha=0.3))
    yield (
        "freeze of the method",
        LabelAware(Tent(adapted, **settings, freeze=["body.2"]), EMA(CLASSES, alpha=0.3)),
    )
    yield "estimator", Tent(adapted, **settings)
    yield "estimator", LabelAware(Tent(adapted, **settings), EM(CLASSES))
    yield "alpha of the estimator", LabelAware(Tent(adapted, **settings), EMA(CLASSES))
    net = make_net("mlp", seed=1)
    adapted = attach(net, make_adapter(net))
    yield "another model", LabelAware(Tent(adapted, **settings), EMA(CLASSES, alpha=0.3))
    net = make_net("mlp")
    adapted = attach(net, make_adapter(net, seed=5))
    yield "another model", LabelAware(Tent(adapted, **settings), EMA(CLASSES, alpha=0.3))


@pytest.mark.parametrize("i", range(8))
def test_a_folder_of_something_else_is_refused(live, i, tmp_path):
    message, other = list(others())[i]
    other.save(tmp_path / "s")
    a = live.stream("a")
    a(BATCHES[0])
    before = a.state()
    with pytest.raises(MismatchError, match=message):
        a.load(tmp_path / "s")
    assert same(a.state(), before)
    with pytest.raises(CheckpointError):
        a.load(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["matched", "eata", "cotta"])
def test_settings_that_are_tensors_are_compared(name, tmp_path):
    net = make_net("mlp")
    bias = torch.linspace(-1, 1, CLASSES)
    inner = make_method(name, attach(net, make_adapter(net)), False)
    live = LabelAware(inner, estimators.create("em", CLASSES, bias=bias))
    live.stream("a")(BATCHES[0])
    live.stream("a").save(tmp_path / "s")
    live.stream("b").load(tmp_path / "s")
    assert same(live.stream("b").state(), live.stream("a").state())
    inner = make_method(name, attach(net, make_adapter(net)), False)
    other = LabelAware(inner, estimators.create("em", CLASSES, bias=bias * 2))
    with pytest.raises(MismatchError, match="bias of the estimator"):
        other.stream("b").load(tmp_path / "s")


def test_a_dropped_stream_is_forgotten(live):
    a = live.stream("a")
    first = a(BATCHES[0])
    own = live.state()
    a(BATCHES[1])
    live.drop("a")
    assert live.streams == []
    assert same(live.state(), own)
    for use in (lambda: a(BATCHES[0]), a.state, a.reset, a.close):
        with pytest.raises(ModelError, match="stream 'a' was closed"):
            use()
    with pytest.raises(UnknownName, match="no stream 'a'"):
        live.drop("a")
    again = live.stream("a")
    assert again is not a
    assert torch.equal(again(BATCHES[0]), first)
    with pytest.raises(ModelError, match="closed"):
        a.close()
    again.close()
    assert live.streams == []


def test_only_a_method_with_a_label_distribution_has_one():
    with pytest.raises(AttributeError, match="prior"):
        _ = Tent(make_net("mlp")).stream("a").prior
    matched = make_method("matched", make_net("mlp"), False)
    a = matched.stream("a")
    a(BATCHES[0])
    assert not torch.equal(a.prior, matched.prior)


def test_the_inner_method_shares_the_streams(live):
    """Whoever uses the method below meets no state of another stream."""
    inner, other = live.method, make_method("tent", make_net("mlp"), True)
    live.stream("a")(BATCHES[0])
    assert inner.streams == ["a"]
    assert torch.equal(inner(BATCHES[1]), other.method(BATCHES[1]))
    assert same(live.state(), other.state())
    b = inner.stream("b")
    b(BATCHES[0])
    assert torch.equal(live.prior, other.prior)
    assert torch.equal(live.stream("b").prior, EMA(CLASSES).prior)


def test_an_estimator_that_joins_later():
    net = make_net("mlp")
    inner = Tent(attach(net, make_adapter(net)))
    inner.stream("a")(BATCHES[0])
    live = LabelAware(inner, EMA(CLASSES))
    live(BATCHES[1])
    assert torch.equal(live.stream("a").prior, EMA(CLASSES).prior)
    assert not torch.equal(live.prior, EMA(CLASSES).prior)


def test_a_copy_has_streams_of_its_own(live):
    a = live.stream("a")
    a(BATCHES[0])
    twin = copy.deepcopy(live)
    before = a.state()
    assert same(twin.stream("a").state(), before)
    twin.stream("a")(BATCHES[1])
    assert same(a.state(), before)


def test_an_interrupted_switch_loses_nothing(live, monkeypatch):
    a, b = live.stream("a"), live.stream("b")
    a(BATCHES[0])
    b(BATCHES[1])
    states = a.state(), b.state(), live.state()
    hold = EMA.hold

    def interrupted(self, state):
        raise KeyboardInterrupt

    monkeypatch.setattr(EMA, "hold", interrupted)
    with pytest.raises(KeyboardInterrupt):
        a(BATCHES[2])
    monkeypatch.setattr(EMA, "hold", hold)
    assert same(b.state(), states[1])
    assert same(a.state(), states[0])
    assert same(live.state(), states[2])


def test_a_stream_within_a_call_of_another_is_refused(live):
    a, b = live.stream("a"), live.stream("b")

    def nested(_layer, args):
        b(BATCHES[0])

    handle = live.model.head.register_forward_pre_hook(nested)
    before = a.state()
    with pytest.raises(ModelError, match="within a call of another"):
        a(BATCHES[0])
    handle.remove()
    assert same(a.state(), before)


def test_sar_recovers_within_its_stream():
    live = make_method("sar", make_net("mlp"), True, recover_below=10.0)
    alone = make_method("sar", make_net("mlp"), True, recover_below=10.0)
    for x in BATCHES:
        live(x.flip(2))
        assert torch.equal(live.stream("a")(x), alone(x))
    assert same(live.stream("a").state(), alone.state())
