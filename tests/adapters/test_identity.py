"""The identity adapter leaves the logits as they are, to the last bit."""

import pytest
import torch

from tests.toys import CLASSES, NETS, make_batches, make_method, make_net
from twoshift.adapters import HeadShift, IdentityAdapter, attach, condition
from twoshift.estimators import EMA
from twoshift.methods import LabelAware, create
from twoshift.models.head import find_head
from twoshift.priors import longtail


def identity(net):
    return attach(net, IdentityAdapter(find_head(net)[1].in_features, CLASSES))


@pytest.mark.parametrize("name", NETS)
def test_the_logits_are_those_of_the_head(name):
    net = make_net(name)
    adapted = identity(net)
    for prior in (None, longtail(CLASSES, 50)):
        if prior is not None:
            condition(adapted, prior)
        for x in make_batches(name):
            with torch.no_grad():
                assert torch.equal(adapted(x), net(x))


@pytest.mark.parametrize(
    ("method", "name"), [("source", "vit"), ("tent", "resnet_bn"), ("iabn", "resnet_iabn")]
)
def test_a_method_runs_as_without_an_adapter(method, name):
    plain, net = make_method(method, make_net(name), False), make_net(name)
    settings = {"lr": 0.02} if method != "source" else {}
    live = LabelAware(create(method, identity(net), **settings), EMA(CLASSES))
    for x in make_batches(name):
        assert torch.equal(live(x), plain(x))


def test_it_is_an_empty_shift_and_knows_nothing_of_the_logits():
    adapter, raw = IdentityAdapter(6, 4, class_counts=[4, 3, 2, 1]), torch.randn(2, 4)
    assert adapter(torch.full((4,), 0.25)) == HeadShift()
    assert adapter.unbiased(raw) is raw
    assert not adapter.needs_training
    assert not list(adapter.parameters())
