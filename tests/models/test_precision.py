"""Classifiers in half precision, with every method."""

import pytest
import torch

from tests.toys import make_batches, make_method, make_net
from twoshift import methods
from twoshift.adapters import attach, logit_adapter
from twoshift.errors import ModelError
from twoshift.estimators import EM
from twoshift.methods import LabelAware, Matched
from twoshift.methods.matched import class_moments
from twoshift.testing import MethodCase, make_adapter, method_checks

HALF = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapter"])
@pytest.mark.parametrize("net", ["mlp", "resnet_iabn", "vit"])
@pytest.mark.parametrize("name", sorted(methods.methods))
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_method_takes_it(dtype, name, net, adapted):
    model = make_net(net).to(dtype)
    try:
        live = make_method(name, model, adapted)
    except ModelError as e:
        pytest.skip(str(e))
    for x in make_batches(net):
        logits = live(x.to(dtype))
        assert logits.dtype == torch.float32
        assert logits.abs().max() < 1000


@pytest.mark.parametrize("check", method_checks(), ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["source", "tent", "bn_stats", "iabn"])
@pytest.mark.parametrize(
    "dtype",
    # a CPU takes its time for its convolutions
    [pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16],
    ids=str,
)
def test_contract(dtype, name, check):
    net = "resnet_iabn" if name == "iabn" else "mlp"
    model, batches = make_net(net).to(dtype), [x.to(dtype) for x in make_batches(net)]
    check(MethodCase(methods.methods[name], model, {}, make_adapter(model), batches, name))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_recommended_combination(dtype, tmp_path):
    """Near the one in full precision, and resumed bit for bit."""
    shares = [0.4, 0.2, 0.2, 0.1, 0.1]
    images = torch.cat(make_batches("mlp"))[:20]
    labels = torch.arange(20) % 5

    def build(net, dtype):
        moments = class_moments(net, [(images.to(dtype), labels)])
        adapter = logit_adapter(net, shares, temperature=1.5)
        return LabelAware(Matched(attach(net, adapter), moments), EM(5, shares, 1.5))

    net, full = make_net("mlp").to(dtype), make_net("mlp")
    live, exact = build(net, dtype), build(full, torch.float32)
    for x in make_batches("mlp"):
        logits = live(x.to(dtype))
        assert (logits - exact(x)).abs().max() < 0.1 * logits.std()
    torch.testing.assert_close(live.prior, exact.prior, atol=0.03, rtol=0.1)
    live.save(tmp_path / "s")
    loaded = methods.Method.load(tmp_path / "s", net)
    x = make_batches("mlp")[0].to(dtype)
    assert torch.equal(loaded(x), live(x))
