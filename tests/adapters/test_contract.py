"""What every registered adapter promises, alone and inside of methods."""

import copy

import pytest
import torch

from tests.adapters import cases
from tests.toys import CLASSES, NETS, make_batches, make_method, make_net, same, snapshot
from twoshift import estimators
from twoshift.adapters import adapted_heads, attach, condition, detach
from twoshift.methods import LabelAware, Method
from twoshift.priors import longtail, uniform

METHODS = [  # nothing moves, one step, a teacher, images, own counts, two passes, no batch norm
    ("source", "mlp"),
    ("tent", "resnet_bn"),
    ("iabn", "resnet_iabn"),
    ("cotta", "resnet_bn"),
    ("note", "resnet_iabn"),
    ("matched", "resnet_bn"),
    ("decoupled", "mlp"),
    ("sar", "vit"),
]
CASES = [(adapter, *method) for adapter in cases.NAMES for method in METHODS]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def case(request):
    return request.param


def build(case, estimator="ema"):
    adapter, method, net = case
    plain = make_net(net)
    inner = make_method(method, attach(plain, cases.make(adapter, plain)), False)
    return LabelAware(inner, estimators.create(estimator, CLASSES))


@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("net", NETS)
def test_attached_conditioned_and_detached(name, net):
    plain, x = make_net(net).train(), make_batches(net)[0]
    adapter = cases.make(name, plain)
    before = snapshot(plain), snapshot(adapter)
    adapted = attach(plain, adapter)
    condition(adapted, longtail(CLASSES, 10))
    restored = detach(adapted)
    assert same(snapshot(plain), before[0])
    assert same(snapshot(adapter), before[1])
    assert list(restored.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        logits = adapted.eval()(x)
        assert torch.equal(restored.eval()(x), plain.eval()(x))
        condition(adapted, uniform(CLASSES))
        moved = not torch.allclose(logits.softmax(1), adapted(x).softmax(1), atol=1e-3)
    assert moved == (name != "identity")


@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_takes_the_precision_of_the_model(name, dtype):
    net = make_net("vit").to(dtype)
    adapted = attach(net, cases.make(name, net))
    logits = adapted(make_batches("vit")[0].to(dtype))
    assert logits.dtype == torch.promote_types(dtype, torch.float32)


def test_the_given_model_and_adapter_are_untouched(case):
    adapter_name, method, name = case
    net = make_net(name).train()
    adapter = cases.make(adapter_name, net)
    adapted = attach(net, adapter)
    before = [snapshot(module) for module in (net, adapter, adapted)]
    live = LabelAware(make_method(method, adapted, False), estimators.create("em", CLASSES))
    for x in make_batches(name):
        assert live(x).isfinite().all()
    live.reset()
    after = [snapshot(module) for module in (net, adapter, adapted)]
    assert all(same(a, b) for a, b in zip(before, after, strict=True))


def test_no_method_moves_the_adapter(case):
    live = build(case)
    expected = dict(cases.make(case[0], make_net(case[2])).state_dict())
    for x in make_batches(case[2]):
        live(x)
    heads = [head for _, head in adapted_heads(live)]
    assert len(heads) == (3 if case[1] == "cotta" else 1)
    for head in heads:
        assert same(dict(head.adapter.state_dict()), expected)
        assert not any(p.requires_grad or p.grad is not None for p in head.adapter.parameters())
        assert torch.equal(head.prior, heads[0].prior)


@pytest.mark.parametrize("estimator", ["ema", "em"])
def test_saved_and_loaded_it_goes_on_bit_for_bit(case, estimator, tmp_path):
    live, batches = build(case, estimator), make_batches(case[2])
    first = live.state()
    for x in batches[:3]:
        live(x)
    live.save(tmp_path / "s")
    restored = Method.load(tmp_path / "s", make_net(case[2]))
    assert type(restored) is LabelAware
    assert same(restored.state(), live.state())
    for _, head in adapted_heads(restored):
        expected = next(head for _, head in adapted_heads(live))
        assert head.adapter.settings() == expected.adapter.settings()
    assert torch.equal(restored(batches[3]), live(batches[3]))
    assert same(restored.state(), live.state())
    restored.reset()
    assert same(restored.state(), first)


def test_raw_logits_are_those_of_the_original_head(case):
    """At the weights and statistics of the pass, so a copy is taken before each batch."""
    live = build(case).method
    with torch.enable_grad():
        for x in make_batches(case[2]):
            before = copy.deepcopy(live)
            scores = live.adapt(x)
            assert scores.raw.shape == scores.logits.shape
            assert not scores.raw.requires_grad
            if case[1] in ("source", "tent", "sar"):  # these predict the batch in one plain pass
                assert torch.equal(scores.raw, detach(before.model)(x))
