"""EATA against a plain loop; its Fisher information, filters and memory of predictions."""

import math

import pytest
import torch
from torch import nn

from tests.methods import slow
from tests.toys import (
    CLASSES,
    make_adapter,
    make_batches,
    make_method,
    make_net,
    same,
    snapshot,
)
from twoshift.adapters import attach
from twoshift.errors import BatchError, ModelError, SettingError
from twoshift.methods.eata import EATA, fisher_information

SIZES = (8, 5, 8, 3, 8, 8, 6, 1, 2, 8, 7)


def cosine(a, b):
    dot = sum(float(x) * float(y) for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(float(x) ** 2 for x in a) * sum(float(y) ** 2 for y in b))


def run_by_hand(net, batches, lr, margin, redundancy, fisher, fisher_weight):
    slow.batch_norms_in_training(net)
    affine = slow.affine(net)
    source = {n: p.detach().clone() for n, p in affine.items()}
    optimizer, average, logits = slow.SGD(list(affine.values()), lr), None, []
    limit, dropped = margin * math.log(CLASSES), {"unsure": 0, "redundant": 0}
    for x in batches:
        z = net(x)
        logits.append(z.detach())
        losses, kept = [], []
        for row in z:
            h, p = slow.mean_entropy(row[None]), row.detach().softmax(0)
            if h.detach() >= limit:
                dropped["unsure"] += 1
            elif average is not None and abs(cosine(average, p)) >= redundancy:
                dropped["redundant"] += 1
            else:
                losses.append(math.exp(limit - float(h.detach())) * h)
                kept.append(p)
        if not kept:
            continue
        loss = sum(losses) / len(losses)
        for name in fisher or {}:
            importance = fisher[name].to(x.dtype)
            move = affine[name] - source[name]
            loss = loss + fisher_weight * (importance * move * move).sum()
        optimizer.step(torch.autograd.grad(loss, list(affine.values())))
        mean = sum(kept) / len(kept)
        average = mean if average is None else 0.9 * average + 0.1 * mean
    return logits, average, dropped


@pytest.mark.parametrize(
    ("name", "margin", "redundancy", "with_fisher"),
    [("resnet_bn", 0.6, 0.97, True), ("vit", 0.7, 0.9, False)],
)
def test_against_a_plain_loop(name, margin, redundancy, with_fisher):
    batches = [x.double() for x in make_batches(name, SIZES)]
    net, by_hand = make_net(name).double(), make_net(name).double()
    fisher = fisher_information(net, batches[:3]) if with_fisher else None
    settings = {"lr": 0.02, "margin": margin, "redundancy": redundancy, "fisher_weight": 20.0}
    if not with_fisher:
        settings["fisher_weight"] = 0.0
    live = EATA(net, fisher=fisher, **settings)
    logits = [live(x) for x in batches]
    expected, average, dropped = run_by_hand(by_hand, batches, fisher=fisher, **settings)
    assert all(dropped.values())  # else the filters would prove nothing
    for got, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    moved = slow.affine(live.model)
    for path, wanted in slow.affine(by_hand).items():
        torch.testing.assert_close(moved[path], wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(live.average, average, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet_bn", "vit"])
def test_fisher_information_against_a_plain_loop(name):
    net, batches = make_net(name).train(), make_batches(name, (8, 5, 7))
    before = snapshot(net)
    with torch.inference_mode():
        got = fisher_information(net, iter([x.clone() for x in batches]))
    assert same(snapshot(net), before)
    by_hand = make_net(name)
    slow.batch_norms_in_training(by_hand)
    affine = slow.affine(by_hand)
    expected = {n: torch.zeros_like(p) for n, p in affine.items()}
    for x in batches:
        z = by_hand(x)
        loss = sum(-row.log_softmax(0)[int(row.argmax())] for row in z) / len(z)
        for n, g in zip(affine, torch.autograd.grad(loss, list(affine.values())), strict=True):
            expected[n] += g**2 / len(batches)
    assert got.keys() == expected.keys()
    for n, wanted in expected.items():
        torch.testing.assert_close(got[n], wanted, rtol=1e-4, atol=1e-6)


def test_fisher_information_holds_the_weights_back():
    net, batches = make_net("resnet_bn"), make_batches("resnet_bn")
    fisher = {n: [1.0] * p.numel() for n, p in slow.affine(net).items()}
    moves = []
    for weight in (0.0, 10.0):
        live = make_method("eata", net, False, fisher=fisher, fisher_weight=weight)
        for x in batches:
            live(x)
        pairs = zip(slow.affine(live.model).values(), slow.affine(net).values(), strict=True)
        moves.append(sum(float((a - b).detach().square().sum()) for a, b in pairs))
    assert moves[1] < 0.7 * moves[0]


def test_without_weight_fisher_information_changes_nothing():
    net, batches = make_net("mlp"), make_batches("mlp")
    fisher = fisher_information(net, batches[:2])
    eta = make_method("eata", net, False)
    live = make_method("eata", net, False, fisher=fisher, fisher_weight=0.0)
    for x in batches:
        assert torch.equal(live(x), eta(x))


def test_fisher_information_of_the_bare_model_fits_with_an_adapter():
    net, batches = make_net("resnet_bn"), make_batches("resnet_bn")
    fisher = fisher_information(net, batches[:2])
    live = make_method("eata", net, True, fisher=fisher)
    for x in batches:
        live(x)
    assert fisher_information(attach(net, make_adapter(net)), batches[:2]).keys() == fisher.keys()
    assert same(live.settings()["fisher"], fisher)


def test_fisher_information_of_nothing():
    with pytest.raises(BatchError, match="batches, must be at least one"):
        fisher_information(make_net("mlp"), [])


def test_fisher_information_must_fit():
    net = make_net("resnet_bn")
    fisher = fisher_information(net, make_batches("resnet_bn")[:1])
    layer = [n for n in fisher if n.startswith("layer4")]
    EATA(net, fisher={n: f for n, f in fisher.items() if n not in layer}, freeze=["layer4"])
    for name in ("bn1.weight", layer[0]):
        with pytest.raises(SettingError, match=f"fisher of {name}, must be given, .* got nothing"):
            EATA(net, fisher={n: f for n, f in fisher.items() if n != name})
    bads = ([1.0], [-1.0] * 4, [math.nan] * 4, [math.inf] * 4)
    for bad in [*bads, *(torch.tensor(bad) for bad in bads)]:
        with pytest.raises(SettingError, match=r"fisher of bn1\.weight, must be 4 finite numbers"):
            EATA(net, fisher={**fisher, "bn1.weight": bad})


def test_the_first_batch_has_no_second_filter():
    """What is like the batches before is left out, so the same batch teaches once."""
    (x,) = make_batches("resnet_bn", (8,))
    live = EATA(make_net("resnet_bn"), lr=1e-9, margin=1.0, fisher_weight=0.0)
    start = live.state()
    live(x)
    after = live.state()
    assert not same(after, start)
    live(x)
    assert same(live.state(), after)


def test_no_sure_sample_no_step():
    net = make_net("resnet_bn")
    fisher = fisher_information(net, make_batches("resnet_bn")[:1])
    live = EATA(net, margin=1e-6, fisher=fisher)
    before = live.state()
    for x in make_batches("resnet_bn"):
        assert live(x).isfinite().all()
    assert same(live.state(), before)


def test_reset_forgets_momentum_and_average():
    live, batches = make_method("eata", make_net("mlp"), False), make_batches("mlp")
    first = [live(x) for x in batches]
    assert live.optimizer.state
    assert float(live.average.sum()) == pytest.approx(1)
    live.reset()
    assert not live.optimizer.state
    assert not live.average.any()
    assert all(torch.equal(live(x), z) for x, z in zip(batches, first, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0}, "lr of the optimiser, must be above 0"),
        ({"optim": "lbfgs"}, "optim of a method, must be one of 'adam', 'sgd'"),
        ({"margin": 0}, "margin of eata, must be above 0, got 0"),
        ({"redundancy": float("nan")}, "redundancy of eata, must be above 0"),
        ({"fisher_weight": -1.0}, "fisher_weight of eata, must be at least 0, got -1"),
        ({"fisher_weight": 2.0}, "fisher of eata, must be given, got None"),
        ({"freeze": ["layer44"]}, "Did you mean 'layer4'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        EATA(make_net("resnet_bn"), **{"fisher_weight": 0.0, **settings})


def test_a_model_without_norm_layers():
    with pytest.raises(ModelError, match="normalisation layers"):
        EATA(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), fisher_weight=0.0)
