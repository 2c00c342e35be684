"""What every registered method promises, on every kind of network, with and without an adapter."""

import inspect
import itertools
import json

import pytest
import torch

from tests.methods.cases import INCOMPATIBLE, build, equal, plain_run
from tests.toys import (
    CLASSES,
    NETS,
    make_adapter,
    make_batches,
    make_method,
    make_net,
    same,
    snapshot,
)
from twoshift.adapters import adapted_heads
from twoshift.errors import BatchError, ModelError
from twoshift.methods import LabelAware, Method, create, methods


def test_logits_have_the_right_shape_are_finite_and_carry_no_graph(case):
    for x, logits in zip(make_batches(case[1]), plain_run(case)[0], strict=True):
        assert logits.shape == (len(x), CLASSES)
        assert logits.dtype == torch.float32
        assert logits.isfinite().all()
        assert not logits.requires_grad
        assert logits.grad_fn is None
        assert not logits.is_inference()


def test_images_may_be_channels_last(case):
    live = build(case)
    for i, x in enumerate(make_batches(case[1])):
        logits = live(x.contiguous(memory_format=torch.channels_last))
        assert logits.isfinite().all()
        if i == 0:
            torch.testing.assert_close(logits, plain_run(case)[0][0], rtol=1e-3, atol=1e-4)


def test_what_adapts_does_move(case):
    states = plain_run(case)[1]
    if build(case).optimizer is not None or case[2]:  # else the tests below would prove nothing
        assert not any(same(a, b) for a, b in itertools.pairwise(states))


def test_the_given_model_is_untouched(case):
    method, name, adapted = case
    net = make_net(name).train()
    next(net.children()).eval()
    next(net.parameters()).requires_grad_(False)
    before = snapshot(net)
    live = make_method(method, net, adapted)
    for x in make_batches(name):
        live(x)
    live.reset()
    assert same(snapshot(net), before)


def test_later_changes_of_the_given_model_do_not_matter(case):
    method, name, adapted = case
    net = make_net(name)
    live = make_method(method, net, adapted)
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            tensor.zero_()
    assert torch.equal(live(make_batches(name)[0]), plain_run(case)[0][0])


def test_the_callers_batch_is_untouched(case):
    live, x = build(case), make_batches(case[1])[0]
    before = x.clone()
    live(x)
    assert torch.equal(x, before)


def test_reset_is_exact(case):
    live, batches = build(case), make_batches(case[1])
    for x in batches:
        live(x)
    live.reset()
    assert same(live.state(), plain_run(case)[1][0])
    assert all(p.grad is None for p in live.parameters())
    assert equal([live(x) for x in batches], plain_run(case)[0])
    assert same(live.state(), plain_run(case)[1][-1])


def test_saved_and_loaded_it_goes_on_bit_for_bit(case, tmp_path):
    live, batches = build(case), make_batches(case[1])
    for x in batches[:3]:
        live(x)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "notes").write_text("somebody else's")
    live.save(tmp_path / "state")
    assert (tmp_path / "state" / "notes").read_text() == "somebody else's"
    restored = Method.load(tmp_path / "state", make_net(case[1]))
    assert type(restored) is type(live)
    assert same(restored.state(), plain_run(case)[1][3])
    assert torch.equal(restored(batches[3]), plain_run(case)[0][3])
    assert same(restored.state(), plain_run(case)[1][4])
    restored.reset()
    assert torch.equal(restored(batches[0]), plain_run(case)[0][0])


def test_the_adapter_never_moves(case):
    if not case[2]:
        return
    live, expected = build(case), make_adapter(make_net(case[1])).state_dict()
    for x in make_batches(case[1]):
        live(x)
    heads = [head for _, head in adapted_heads(live)]
    assert heads
    for head in heads:
        assert same(dict(head.adapter.state_dict()), dict(expected))
        assert all(p.grad is None for p in head.adapter.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_gradient_mode_does_not_matter(case, mode):
    live = build(case)
    with mode():
        # inside, a copy is an inference tensor in inference mode
        logits = [live(x.clone()) for x in make_batches(case[1])]
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
    assert equal(logits, plain_run(case)[0])
    assert same(live.state(), plain_run(case)[1][-1])


def test_it_can_be_built_in_inference_mode(case):
    with torch.inference_mode():
        live = build(case)
        logits = [live(x) for x in make_batches(case[1])]
    assert equal(logits, plain_run(case)[0])


def test_no_gradient_reaches_the_caller(case):
    live, x = build(case), make_batches(case[1])[0].requires_grad_()
    made_of_x = x * 1
    assert torch.equal(live(made_of_x), plain_run(case)[0][0])
    assert x.grad is None
    made_of_x.sum().backward()  # the caller's graph is still there


def test_runs_repeat_whatever_the_global_seed(case):
    logits = []
    with torch.random.fork_rng():
        for seed in (0, 1):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            live = build(case)
            logits.append([live(x) for x in make_batches(case[1])])
            assert torch.equal(torch.get_rng_state(), before)
    assert equal(logits[0], plain_run(case)[0])
    assert equal(logits[1], plain_run(case)[0])


def test_train_and_eval_change_nothing(case):
    live, logits = build(case), []
    for i, x in enumerate(make_batches(case[1])):
        assert (live.train() if i % 2 else live.eval()) is live
        logits.append(live(x))
    assert equal(logits, plain_run(case)[0])


def test_settings_rebuild_it(case):
    method, name, adapted = case
    settings = build(case).settings()
    settings = json.loads(json.dumps(settings))
    rebuilt = make_method(method, make_net(name), adapted, **settings)
    assert rebuilt.settings() == settings
    assert equal([rebuilt(x) for x in make_batches(name)], plain_run(case)[0])


def test_a_refused_batch_leaves_no_trace(case):
    live, logits = build(case), []
    for i, x in enumerate(make_batches(case[1])):
        for bad in (x * float("nan"), x[:, :2], x[:0]):
            with pytest.raises(BatchError):
                live(bad)
            assert same(live.state(), plain_run(case)[1][i])
        logits.append(live(x))
    assert equal(logits, plain_run(case)[0])


def test_device_is_the_models(case):
    assert build(case).device == torch.device("cpu")


@pytest.mark.parametrize("name", list(methods))
def test_adapt_sees_images_only(name):
    assert list(inspect.signature(methods[name].adapt).parameters) == ["self", "x"]
    assert list(inspect.signature(LabelAware.adapt).parameters) == ["self", "x"]


@pytest.mark.parametrize("name", list(methods))
def test_every_setting_is_stored_under_its_name(name):
    net = next(n for n in NETS if (name, n) not in INCOMPATIBLE)
    live = make_method(name, make_net(net), False)
    assert list(live.settings()) == list(inspect.signature(methods[name]).parameters)[1:]


@pytest.mark.parametrize(("method", "net"), INCOMPATIBLE)
def test_incompatible_pairs_are_refused(method, net):
    with pytest.raises(ModelError, match=r"normalisation layers|IABN layers"):
        create(method, make_net(net))


def test_the_incompatible_pairs_exist():
    assert all(method in methods and net in NETS for method, net in INCOMPATIBLE)
