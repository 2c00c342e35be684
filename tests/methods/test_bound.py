"""One batch moves running statistics no further than a bound, where there is one."""

import pytest
import torch

from tests.toys import make_batches, make_method, make_net, same
from twoshift.bench.keys import keyed_settings
from twoshift.errors import SettingError
from twoshift.methods import IABN, Source, methods
from twoshift.models.norm import batch_norms
from twoshift.registry import signature_settings

BOUNDED = [
    ("iabn", "resnet_iabn"),
    ("note", "resnet_iabn"),
    ("im_loss", "resnet_iabn"),
    ("onda", "resnet_iabn"),
    ("onda", "resnet_bn"),
    ("onda", "mlp"),
    ("rotta", "resnet_bn"),
    ("rotta", "mlp"),
    ("delta", "resnet_bn"),
    ("delta", "mlp"),
]


def test_every_method_with_the_setting_is_here():
    with_bound = {n for n in methods if "bound" in signature_settings(methods[n])}
    assert with_bound == {name for name, _ in BOUNDED}


def statistics(live, kind):
    return [t.clone() for n, t in live.state().items() if n.endswith(kind)]


@pytest.mark.parametrize(("name", "net"), BOUNDED)
@pytest.mark.parametrize("bound", [0.5, 2.0])
def test_a_broken_batch_moves_statistics_by_the_bound(name, net, bound):
    momentum = {"rotta": "alpha", "delta": "statistics_momentum"}.get(name, "momentum")
    live = make_method(name, make_net(net), False, bound=bound, **{momentum: 0.1})
    free = make_method(name, make_net(net), False, **{momentum: 0.1})
    steps = 2 if name in ("onda", "rotta", "note") else 1  # updates of four images each
    mean, spread = ("test_mean", "test_std") if name == "delta" else ("running_mean", "running_var")
    x = make_batches(net, sizes=(8,))[0]
    if name == "delta":  # its statistics start at the first batch
        live(x)
        free(x)
    means, spreads = statistics(live, mean), statistics(live, spread)
    live(x * 255)
    free(x * 255)
    factor = 1.1 * (1 + 0.1 * ((1 + bound) ** (1 if name == "delta" else 2) - 1))
    bounded = True
    for method in (live, free):
        for before, now, size in zip(means, statistics(method, mean), spreads, strict=True):
            deviation = size if name == "delta" else size.clamp_min(1e-5).sqrt()
            reach = 0.1 * bound * deviation * steps * factor**steps
            bounded = bounded and bool(((now - before).abs() <= reach + 1e-4).all())
        for before, now in zip(spreads, statistics(method, spread), strict=True):
            bounded = bounded and bool((now <= before * factor**steps + 1e-3).all())
        assert bounded == (method is live)


@pytest.mark.parametrize(("name", "net"), BOUNDED)
def test_a_wide_bound_changes_nothing(name, net):
    """Statistics within the bound move as without one."""
    free, live = (make_method(name, make_net(net), True, bound=b) for b in (None, 1e4))
    for x in make_batches(net):
        assert torch.equal(live(x), free(x))
    assert same(live.state(), free.state())


@pytest.mark.parametrize("name", ["iabn", "onda", "rotta", "delta", "note"])
@pytest.mark.parametrize("bound", [0, -1, float("nan"), "2"])
def test_impossible_bounds_are_refused(name, bound):
    net = make_net("resnet_iabn" if name in ("iabn", "note") else "resnet_bn")
    with pytest.raises(SettingError, match="bound"):
        make_method(name, net, False, bound=bound)


def test_one_broken_batch_ruins_iabn_without_a_bound_and_not_with_one():
    """Images of 0 to 255 among images of 0 to 1."""
    net = make_net("resnet_iabn")
    *good, last = make_batches("resnet_iabn", sizes=(16,) * 12)
    truth = Source(net)(last).argmax(1)

    def agreement(bound):
        live = IABN(net, momentum=0.1, lr=1e-6, bound=bound)
        for x in good[:2]:
            live(x)
        live(good[2] * 255)
        for x in good[3:]:
            live(x)
        return float((live(last).argmax(1) == truth).float().mean())

    assert agreement(None) < 0.6
    assert agreement(1.0) > 0.9


def test_the_keys_of_published_records_stay():
    for name, _ in BOUNDED:
        entry = methods[name]
        assert "bound" not in keyed_settings("methods", name, entry, {})
        assert "bound" not in keyed_settings("methods", name, entry, {"bound": None})
        assert keyed_settings("methods", name, entry, {"bound": 2.0})["bound"] == 2.0


def test_each_layer_moves():
    """Otherwise the bounds above would hold for nothing."""
    live = make_method("onda", make_net("resnet_bn"), False, bound=1.0)
    before = [layer.running_mean.clone() for _, layer in batch_norms(live.model)]
    live(make_batches("resnet_bn")[0])
    after = [layer.running_mean for _, layer in batch_norms(live.model)]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
