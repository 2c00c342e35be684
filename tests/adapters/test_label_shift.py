"""The label shift adapter against its formula by loops; the identity when fresh."""

import itertools

import pytest
import torch
from torch import nn

from tests.adapters import slow
from tests.adapters.slow import PRIOR, C, D
from tests.toys import CLASSES, NETS, make_batches, make_net, randomise
from twoshift.adapters import AdaptedHead, LabelShiftAdapter, attach, condition, shifted_logits
from twoshift.adapters.label_shift import FORMS
from twoshift.errors import SettingError
from twoshift.models.head import find_head
from twoshift.priors import from_counts, longtail, reverse, uniform

PARTS = [
    (dw, gamma, beta, db)
    for dw, gamma, beta, db in itertools.product(FORMS, *[(True, False)] * 3)
    if gamma or beta or db or dw != "none"
]


@pytest.mark.parametrize(("dw", "gamma", "beta", "db"), PARTS)
@pytest.mark.parametrize("condition_on", ["scalar", "full"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_the_formula(dw, gamma, beta, db, condition_on, bias):
    parts = {"dw": dw, "gamma": gamma, "beta": beta, "db": db}
    counts = [3, 40, 10, 7]
    adapter = LabelShiftAdapter(
        D, C, hidden=5, condition=condition_on, class_counts=counts, **parts
    )
    randomise(adapter)
    g = torch.Generator().manual_seed(0)
    head = nn.Linear(D, C, bias=bias)
    h = torch.randn(3, D, generator=g)
    adapted = AdaptedHead(head, adapter)
    condition(adapted, PRIOR)
    head.requires_grad_(False)
    expected = slow.label_shift_logits(adapter, PRIOR, h, head.weight, head.bias)
    torch.testing.assert_close(adapted(h).detach(), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, head(h), atol=1e-2)


@pytest.mark.parametrize(("dw", "gamma", "beta", "db"), PARTS)
@pytest.mark.parametrize("condition_on", ["scalar", "full"])
def test_a_fresh_adapter_is_the_identity(dw, gamma, beta, db, condition_on):
    settings = {"dw": dw, "gamma": gamma, "beta": beta, "db": db, "condition": condition_on}
    head = nn.Linear(D, C)
    adapted = AdaptedHead(head, LabelShiftAdapter(D, C, **settings))
    h = torch.randn(8, D)
    for prior in (longtail(C, 100), uniform(C), reverse(longtail(C, 100))):
        condition(adapted, prior)
        torch.testing.assert_close(adapted(h), head(h), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NETS)
def test_a_fresh_adapter_leaves_every_network_as_it_is(name):
    net, x = make_net(name), make_batches(name)[0]
    fresh = LabelShiftAdapter(find_head(net)[1].in_features, CLASSES)
    torch.testing.assert_close(attach(net, fresh)(x), net(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dw", FORMS)
def test_a_fresh_adapter_can_learn(dw):
    """Zero is no saddle: every part of the last layers moves under some gradient."""
    adapter, h = LabelShiftAdapter(D, C, dw=dw), torch.randn(8, D)
    labels = torch.randint(C, (8,))
    optimizer = torch.optim.SGD(adapter.parameters(), lr=1.0)
    shapes = (torch.randn(C, D), torch.randn(C))
    for _ in range(3):
        loss = nn.functional.cross_entropy(shifted_logits(h, *shapes, adapter(PRIOR)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    shift = adapter(PRIOR)
    assert (shift.scale - 1).abs().max() > 1e-3
    assert shift.bias.abs().max() > 1e-3
    parts = shift.weight if isinstance(shift.weight, tuple) else (shift.weight,)
    assert dw == "none" or all(p.abs().max() > 1e-3 for p in parts)


def count(adapter):
    return sum(p.numel() for p in adapter.parameters())


def test_size():
    assert count(LabelShiftAdapter(512, 100)) == pytest.approx(0.124e6, rel=0.01)
    assert count(LabelShiftAdapter(2048, 1000)) < 1e6
    assert count(LabelShiftAdapter(512, 100, dw="full")) > 5e6


@pytest.mark.parametrize(
    ("classes", "ratio", "images", "degree"),
    [(10, 100, 5000, 0.681), (100, 100, 500, 0.595), (10, 50, 1000, 0.622), (100, 50, 100, 0.549)],
)
def test_degree_of_imbalance(classes, ratio, images, degree):
    """The values of the CIFAR sets; the last ones are of whole test images, cut off."""
    counts = [
        int(images * p / longtail(classes, ratio)[0] + 1e-9) for p in longtail(classes, ratio)
    ]
    prior = longtail(classes, ratio) if ratio == 100 else from_counts(counts)
    adapter = LabelShiftAdapter(D, classes)
    for sign, p in ((1, prior), (0, uniform(classes)), (-1, reverse(prior))):
        s = float(adapter.degree(torch.from_numpy(p).float()))
        assert s == pytest.approx(sign * degree, abs=6e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dw": "rank2"}, "dw of the adapter, must be one of"),
        ({"condition": "none"}, "condition, must be one of"),
        ({"condition": "classwise"}, r"condition, must be one of .* Use ClasswiseAdapter\."),
        ({"dw": "none", "gamma": False, "beta": False, "db": False}, "at least one of gamma"),
        ({"lambdas": (1, 0)}, "lambdas, must be three numbers"),
        ({"class_counts": [1, 2]}, "class_counts, must be of length 4, got length 2"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        LabelShiftAdapter(D, C, **settings)


def test_it_does_not_know_what_the_logits_contain():
    raw = torch.randn(3, C)
    assert LabelShiftAdapter(D, C, class_counts=[8, 4, 2, 1]).unbiased(raw) is raw
