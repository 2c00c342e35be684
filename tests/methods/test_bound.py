"""One batch moves running statistics no further than a bound, where there is one."""

import itertools
from pathlib import Path

import pytest
import torch

from tests.toys import make_batches, make_method, make_net, same
from twoshift import data
from twoshift.bench.keys import keyed_settings
from twoshift.data.stream import Stream
from twoshift.errors import SettingError
from twoshift.methods import IABN, NOTE, ONDA, methods
from twoshift.models.norm import batch_norms
from twoshift.registry import signature_settings
from twoshift.train.checkpoint import load_source

ROOT = Path(__file__).parents[2]

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


def test_one_broken_batch_is_felt_long_after_without_a_bound_and_not_with_one():
    """Images of 0 to 255 among images of 0 to 1."""
    net = make_net("resnet_iabn")
    *good, last = make_batches("resnet_iabn", sizes=(16,) * 12)

    def predictions(bound, broken):
        live = IABN(net, lr=1e-6, bound=bound)
        for i, x in enumerate(good):
            live(x * 255 if broken and i == 2 else x)
        return live(last).softmax(1)

    def harm(bound):
        return float((predictions(bound, True) - predictions(bound, False)).abs().sum(1).mean())

    assert harm(None) > 0.1
    assert harm(2.0) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("method", [IABN, NOTE, ONDA])
def test_a_real_model_survives_a_broken_batch(method, shared_data):
    source = load_source(ROOT / "checkpoints" / "cifar10-iabn")
    stream = Stream(data.load("cifar10", "test", root=shared_data), seed=0)
    batches = list(itertools.islice(stream, 20))

    def accuracy(bound, broken):
        live, right = method(source.model, bound=bound), []
        for i, batch in enumerate(batches):
            logits = live(batch.x * 255 if broken and i == 4 else batch.x)
            right += [logits.argmax(1) == torch.as_tensor(batch.y)] if i > 4 else []
        return float(torch.cat(right).float().mean())

    whole = accuracy(None, False)
    assert accuracy(None, True) < whole - 0.1
    assert accuracy(1.0, True) > whole - 0.02


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
