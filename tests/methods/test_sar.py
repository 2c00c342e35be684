"""SAR against a plain loop; which layers it leaves alone; its recovery from collapse."""

import math
import re

import pytest
import torch
from torch import nn

from tests.methods import slow
from tests.toys import CLASSES, make_adapter, make_batches, make_net, same
from twoshift import models
from twoshift.adapters import LabelShiftAdapter, attach, condition
from twoshift.errors import ModelError, SettingError
from twoshift.estimators import EMA
from twoshift.methods import LabelAware
from twoshift.methods.sar import SAR, late_norms
from twoshift.models.vit import Block
from twoshift.priors import longtail

SIZES = (8, 5, 8, 3, 8, 8, 6, 2, 2, 8, 7)
LATE = {"resnet_bn": ["layer4"], "resnet_iabn": ["layer4"], "vit": ["blocks.1", "norm"], "mlp": []}


def doubled(name, adapted=False):
    """In float64: a gradient of length one amplifies the last bits."""
    net = make_net(name)
    if adapted:
        net = attach(net, make_adapter(net))
        condition(net, longtail(CLASSES, 20))
    return net.double()


@torch.no_grad()
def surest(logits, among, limit):
    return [i for i in among if slow.mean_entropy(logits[i : i + 1]) < limit]


def mean_over(logits, kept):
    return sum(slow.mean_entropy(logits[i : i + 1]) for i in kept) / len(kept)


def run_by_hand(net, batches, frozen, lr, rho, margin, recover_below):
    slow.batch_norms_in_training(net)
    parameters = list(slow.affine(net, frozen).values())
    source = [p.detach().clone() for p in parameters]
    optimizer, average, logits = slow.SGD(parameters, lr), None, []
    limit, dropped, recoveries = margin * math.log(CLASSES), [0, 0], 0
    for x in batches:
        z = net(x)
        logits.append(z.detach())
        kept = surest(z, range(len(x)), limit)
        dropped[0] += len(x) - len(kept)
        if not kept:
            continue
        grads = torch.autograd.grad(mean_over(z, kept), parameters)
        length = math.sqrt(sum(float(g.square().sum()) for g in grads))
        here = [p.data.clone() for p in parameters]
        for p, g in zip(parameters, grads, strict=True):
            p.data = p.data + rho * g / (length + 1e-12)
        z = net(x)
        again = surest(z, kept, limit)
        dropped[1] += len(kept) - len(again)
        if again:
            loss = mean_over(z, again)
            grads = torch.autograd.grad(loss, parameters)
        for p, value in zip(parameters, here, strict=True):
            p.data = value
        if again:
            optimizer.step(grads)
            loss = float(loss.detach())
            average = loss if average is None else 0.9 * average + 0.1 * loss
            if average < recover_below:
                for p, value in zip(parameters, source, strict=True):
                    p.data = value.clone()
                optimizer, average, recoveries = slow.SGD(parameters, lr), None, recoveries + 1
    return logits, average, dropped, recoveries


@pytest.mark.parametrize(
    ("name", "adapted", "margin", "recover_below"),
    [("resnet_bn", False, 0.5, None), ("vit", True, 0.76, None), ("mlp", False, 0.8, 1.1)],
)
def test_against_a_plain_loop(name, adapted, margin, recover_below):
    batches = [x.double() for x in make_batches(name, SIZES)]
    by_hand, lr, rho = doubled(name, adapted), 0.02, 0.3
    live = SAR(doubled(name, adapted), lr=lr, rho=rho, margin=margin, recover_below=recover_below)
    logits = [live(x) for x in batches]
    expected, average, dropped, recoveries = run_by_hand(
        by_hand, batches, LATE[name], lr, rho, margin, recover_below or 0.0
    )
    assert all(dropped)  # else the filters would prove nothing
    assert (recoveries > 0) == (recover_below is not None)
    for got, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    moved = slow.affine(live.model)
    for path, wanted in slow.affine(by_hand).items():
        torch.testing.assert_close(moved[path], wanted, rtol=1e-5, atol=1e-5)
    assert float(live.average) == pytest.approx(average or math.inf, rel=1e-5)


def test_only_early_norm_weights_move():
    net = make_net("resnet_bn")
    live = SAR(net, margin=1.0)
    for x in make_batches("resnet_bn"):
        live(x)
    moves, source = slow.affine(live.model, ["layer4"]), dict(net.named_parameters())
    for path, parameter in live.model.named_parameters():
        assert torch.equal(parameter, source[path]) == (path not in moves), path
        assert (parameter.grad is None) == (path not in moves), path
    for path, buffer in net.named_buffers():
        assert torch.equal(live.model.get_buffer(path), buffer), path


def left_alone(net):
    return {f"{path}.{kind}" for path in late_norms(net) for kind in ("weight", "bias")}


@pytest.mark.parametrize("norm", ["bn", "iabn", "gn"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_the_last_stage_of_a_resnet_is_left_alone(norm, blocks):
    net = models.create("resnet18_cifar", width=4, norm=norm, blocks=blocks)
    official = {path for path in slow.affine(net) if "layer4" in path}
    assert left_alone(net) == official
    assert left_alone(attach(net, adapter_for(net))) == official
    assert {p[2:] for p in left_alone(nn.Sequential(nn.Identity(), net))} == official


def adapter_for(net):
    return LabelShiftAdapter(net.fc.in_features, net.fc.out_features)


def test_the_names_of_the_stages_do_not_matter():
    net = models.create("resnet18_cifar", width=4)
    other = nn.Sequential(net.conv1, net.bn1, net.layer1, net.layer2, net.layer3, net.layer4)
    assert left_alone(other) == {p for p in slow.affine(other) if p.startswith("5.")}
    tree = nn.ModuleDict({"stem": net.bn1, "x": net.layer1, "layer4": net.layer2, "z": net.layer3})
    assert left_alone(tree) == {p for p in slow.affine(tree) if p.startswith("z.")}


class OtherNames(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.before = nn.LayerNorm(8)
        self.trunk = nn.ModuleList(Block(8, 2) for _ in range(depth))
        self.after, self.out = nn.LayerNorm(8), nn.Linear(8, 3)


def test_the_last_quarter_of_a_transformer_is_left_alone():
    vit = models.create("vit_cifar", classes=CLASSES, width=8, blocks=12, heads=2)
    official = {
        path
        for path in slow.affine(vit)
        if any(part in path for part in ("blocks.9.", "blocks.10.", "blocks.11."))
        or path.startswith("norm.")
    }
    assert len(official) == 14
    assert left_alone(vit) == official
    renamed = {re.sub("^norm", "after", re.sub("^blocks", "trunk", path)) for path in official}
    assert left_alone(OtherNames(12)) == renamed


def test_the_last_stage_of_a_convnext_is_left_alone():
    net = models.create("convnext_cifar", width=4)
    assert left_alone(net) == {p for p in slow.affine(net) if p.startswith(("stages.2.", "norm."))}


@pytest.mark.parametrize(
    "net",
    [
        lambda: make_net("mlp"),
        lambda: OtherNames(1),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)),
    ],
    ids=["mlp", "one block", "plain"],
)
def test_without_stages_nothing_is_left_alone(net):
    assert late_norms(net()) == []


def test_something_is_always_left_to_adapt():
    early, late = nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4)
    net = nn.Sequential(*(nn.Sequential(nn.Sequential(norm)) for norm in (early, late)))
    assert late_norms(net) == []


def test_the_choice_can_be_overruled():
    everything = SAR(make_net("resnet_bn"), freeze=())
    assert len(everything._optimised()) == len(slow.affine(everything.model))
    live = SAR(make_net("resnet_bn"), freeze=["bn1", "layer1"])
    assert len(live._optimised()) == len(slow.affine(live.model, ["bn1", "layer1"]))
    assert live.settings()["freeze"] == ["bn1", "layer1"]
    assert SAR(make_net("resnet_bn")).settings()["freeze"] is None


def collapse(live):
    """Constant features far out: every prediction is the same and certain."""
    with torch.no_grad():
        last = live.model.body[6]
        last.weight.zero_()
        last.bias.copy_(torch.arange(12.0) * 20)


@pytest.mark.parametrize("adapted", [False, True])
def test_recovery_from_collapse_happens_once(adapted, monkeypatch):
    net, (first, *batches) = make_net("mlp"), make_batches("mlp", (8,) * 60)
    inner = SAR(attach(net, make_adapter(net)) if adapted else net, margin=1.0, recover_below=0.15)
    live = LabelAware(inner, EMA(CLASSES, alpha=0.3)) if adapted else inner
    recoveries = []
    load_state = SAR.load_state
    monkeypatch.setattr(
        SAR, "load_state", lambda self, s: (recoveries.append(1), load_state(self, s))
    )
    live(first)
    assert inner.optimizer.state
    collapse(inner)
    while not recoveries:
        x = batches.pop()
        estimate = live.prior if adapted else None
        logits = live(x)
        assert slow.mean_entropy(logits.double()) < 1e-3  # of the collapsed model, still
    assert len(batches) < 59 - 5  # one sure batch is not a collapse
    assert not inner.optimizer.state
    assert inner.average == math.inf
    for name, parameter in net.named_parameters():
        if name in slow.affine(net):
            assert torch.equal(inner.model.get_parameter(name), parameter)
    source = SAR(attach(net, make_adapter(net)) if adapted else net, margin=1.0)
    if adapted:  # what the adapter was told, and the estimate, go on
        assert torch.equal(inner.model.head.prior, estimate)
        assert live.prior.max() > 0.9
        condition(source, live.prior)
    x = batches.pop()
    assert torch.equal(live(x), source(x))
    for x in batches[:20]:
        live(x)
    assert len(recoveries) == 1


def test_without_a_limit_there_is_no_recovery():
    live = SAR(make_net("mlp"), margin=1.0, recover_below=None)
    collapse(live)
    for x in make_batches("mlp", (8,) * 12):
        assert slow.mean_entropy(live(x).double()) < 1e-3


def test_no_sure_sample_no_step():
    live = SAR(make_net("resnet_bn"), margin=1e-6)
    before = live.state()
    for x in make_batches("resnet_bn"):
        assert live(x).isfinite().all()
    assert same(live.state(), before)


def test_no_sample_sure_after_the_climb_no_step():
    """The weights are back where they were, exactly."""
    live, (x,) = SAR(make_net("resnet_gn"), margin=0.3, rho=30.0), make_batches("resnet_gn", (8,))
    before = live.state()
    logits = live(x)
    assert min(float(slow.mean_entropy(z[None])) for z in logits) < 0.3 * math.log(CLASSES)
    assert same(live.state(), before)


def test_reset_forgets_momentum_and_average():
    live, batches = SAR(make_net("resnet_bn"), margin=1.0), make_batches("resnet_bn")
    first = [live(x) for x in batches]
    assert live.optimizer.state
    assert live.average.isfinite()
    live.reset()
    assert not live.optimizer.state
    assert live.average == math.inf
    assert all(torch.equal(live(x), z) for x, z in zip(batches, first, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0}, "lr of the optimiser, must be above 0"),
        ({"optim": "sam"}, "optim of a method, must be one of 'adam', 'sgd'"),
        ({"rho": 0}, "rho of sar, must be above 0, got 0"),
        ({"margin": -1.0}, "margin of sar, must be above 0"),
        ({"margin": float("nan")}, "margin of sar, must be above 0"),
        ({"recover_below": 0.0}, "recover_below of sar, must be above 0"),
        ({"freeze": ["layer44"]}, "Did you mean 'layer4'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        SAR(make_net("resnet_bn"), **settings)


def test_a_model_without_norm_layers():
    with pytest.raises(ModelError, match="normalisation layers"):
        SAR(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)))
