"""Every odd classifier x source, TENT, BN stats, and the recommended combination."""

import copy

import pytest
import torch
from torch import nn

from tests.models.zoo import ZOO
from tests.toys import CLASSES, same, snapshot
from twoshift import methods
from twoshift.adapters import ANSWER, adapted_heads, attach, detach, logit_adapter
from twoshift.estimators import EM
from twoshift.methods import LabelAware, Matched, Method
from twoshift.methods.matched import class_moments
from twoshift.models.classifier import prepare
from twoshift.models.head import class_count, trace_head
from twoshift.models.norm import batch_norms

NAMES = list(ZOO)
PRIOR = [0.4, 0.2, 0.2, 0.1, 0.1]
NORMED = [name for name in NAMES if name != "layered"]


def recommended(odd, net, place):
    """Matched statistics, logit adjustment and EM, with the adapter at ``place``."""
    g = torch.Generator().manual_seed(2)
    source = odd.batches((15, 15), seed=3)
    batches = [(x, torch.randperm(len(x), generator=g) % CLASSES) for x in source]
    adapter = logit_adapter(net, PRIOR, None, 1.5, place, CLASSES)
    inner = Matched(attach(net, adapter, place), class_moments(net, batches))
    return LabelAware(inner, EM(CLASSES, PRIOR))


@pytest.mark.parametrize("name", NAMES)
def test_source_predicts_as_the_model_itself(name):
    odd = ZOO[name]
    net = odd.given()
    live = methods.create("source", net)
    for x in odd.batches():
        assert torch.equal(live(x), odd.read(net(x)).float())


@pytest.mark.parametrize("name", NAMES)
def test_the_head_is_the_layer_whose_output_is_the_answer(name):
    odd = ZOO[name]
    assert trace_head(odd.given(), odd.batches()[0]) == odd.head


@pytest.mark.parametrize("method", ["tent", "bn_stats", "recommended"])
@pytest.mark.parametrize("name", NAMES)
def test_the_given_model_is_untouched(name, method):
    if name == "layered" and method != "tent":
        pytest.skip("no batch normalisation")
    odd = ZOO[name]
    net = odd.given().train()
    before, hooks = snapshot(net), hooks_of(net)
    if method == "recommended":
        live = recommended(odd, net, odd.head or ANSWER)
    else:
        live = methods.create(method, net)
    for x in odd.batches():
        assert live(x).isfinite().all()
    live.reset()
    assert same(snapshot(net), before)
    assert hooks_of(net) == hooks


def hooks_of(net):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in net.modules()]


@pytest.mark.parametrize("method", ["tent", "bn_stats"])
@pytest.mark.parametrize("name", NORMED)
def test_methods_adapt_the_wrapped_as_the_bare_one(name, method):
    odd = ZOO[name]
    wrapped, bare = methods.create(method, odd.given()), methods.create(method, odd.bare())
    for x in odd.batches():
        assert torch.equal(wrapped(x), bare(x))
    assert same(wrapped.state(), bare.state())


@pytest.mark.parametrize("name", NORMED)
def test_a_saved_state_moves_between_wrapped_and_bare(name, tmp_path):
    odd = ZOO[name]
    live = recommended(odd, odd.given(), odd.head or ANSWER)
    first, second, third = odd.batches()
    live(first)
    live.save(tmp_path / "wrapped")
    bare = Method.load(tmp_path / "wrapped", odd.bare())
    assert same(bare.state(), live.state())
    assert torch.equal(bare(second), live(second))
    bare.save(tmp_path / "bare")
    again = Method.load(tmp_path / "bare", odd.given())
    assert torch.equal(again(third), live(third))
    again.reset()
    live.reset()
    assert same(again.state(), live.state())


@pytest.mark.parametrize("name", NORMED)
def test_an_adapter_behind_the_model_does_the_same_as_one_at_its_head(name):
    odd = ZOO[name]
    if odd.head is None:
        pytest.skip("no layer's output is the answer")
    at_head, behind = (recommended(odd, odd.bare(), place) for place in (odd.head, ANSWER))
    tolerance = 2e-5 if odd.dtype == torch.float32 else 0.05
    for x in odd.batches():
        torch.testing.assert_close(at_head(x), behind(x), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(at_head.prior, behind.prior, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_attach_and_detach_behind_the_model(name):
    odd = ZOO[name]
    net = odd.given()
    adapted = attach(net, logit_adapter(net, head=ANSWER, classes=CLASSES), ANSWER)
    ((path, head),) = adapted_heads(adapted)
    assert path == ANSWER
    assert (head.in_features, head.out_features) == (CLASSES, CLASSES)
    assert class_count(adapted) == CLASSES
    x = odd.batches()[0]
    restored = detach(adapted)
    assert torch.equal(restored(x), odd.read(net(x)).float())
    assert list(restored.state_dict()) == list(odd.bare().state_dict()) or "inside" in name


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_of_the_bare_network(name):
    odd = ZOO[name]
    prepared = prepare(odd.given())
    names = [n.replace("module.", "").replace("_orig_mod.", "") for n in odd.bare().state_dict()]
    assert list(prepared.state_dict()) == names
    assert not any(isinstance(m, nn.DataParallel) for m in prepared.modules())


def test_a_distributed_model_is_unwrapped(tmp_path):
    odd = ZOO["plain"]
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        net = nn.parallel.DistributedDataParallel(odd.bare())
        x = odd.batches()[0]
        assert torch.equal(methods.create("tent", net)(x), methods.create("tent", odd.bare())(x))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("method", ["onda", "rotta", "delta", "decoupled", "cotta", "sar", "tribe"])
@pytest.mark.parametrize("name", ["synchronised", "norm_act"])
def test_methods_that_replace_batch_norms_take_other_kinds(name, method):
    """As if the activation were a layer of its own."""
    odd = ZOO[name]
    net = odd.bare()
    apart = copy.deepcopy(net)
    for path, layer in list(batch_norms(apart)):
        plain = nn.BatchNorm2d(layer.num_features)
        plain.load_state_dict({n: t for n, t in layer.state_dict().items() if "." not in n})
        follow = [m for m in (getattr(layer, n, None) for n in ("drop", "act")) if m is not None]
        parent, _, child = path.rpartition(".")
        setattr(apart.get_submodule(parent), child, nn.Sequential(plain, *follow).eval())
    settings = {"update_every": 4} if method in ("onda", "rotta") else {}
    settings |= {"views": 2} if method == "cotta" else {}
    live, expected = (methods.create(method, n, **settings) for n in (net, apart))
    for x in odd.batches():
        torch.testing.assert_close(live(x), expected(x))
