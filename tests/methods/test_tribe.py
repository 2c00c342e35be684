"""TRIBE against a plain loop over three networks with slow layers."""

import copy
import math

import pytest
import torch
from torch import nn

from tests.methods import slow
from tests.toys import CLASSES, make_adapter, make_batches, make_net
from twoshift.adapters import adapted_heads, attach
from twoshift.errors import BatchError, ModelError, SettingError
from twoshift.estimators import EMA
from twoshift.methods import TRIBE, BalancedBN, LabelAware
from twoshift.methods._views import strong_view
from twoshift.models.balanced_norm import BalancedNorm

SIZES = (4, 5, 8, 1, 3, 6, 2, 7, 4, 3)


class Slow:
    """Three networks; the weights of the student are copied into the teacher."""

    def __init__(self, net, lr, eta, gamma, margin, anchor_weight):
        self.limit, self.anchor_weight = margin * math.log(CLASSES), anchor_weight
        self.names = list(slow.affine(net))
        self.nets = {who: copy.deepcopy(net) for who in ("model", "student", "source")}
        self.layers = {
            who: slow.balance(part, CLASSES, eta, gamma) for who, part in self.nets.items()
        }
        weights = [self.nets["student"].get_parameter(n) for n in self.names]
        self.optimizer = slow.Adam(weights, lr)
        self.generator, self.sure, self.unsure = torch.Generator(), 0, 0

    def __call__(self, x):
        teacher, student, source = self.nets.values()
        with torch.no_grad():
            prediction = teacher(x)
        view = strong_view(x, self.generator)
        self.let_move(prediction.argmax(1).tolist())
        outputs = teacher(x), student(view), source(x).detach()
        self.let_move(None)
        labels, pulls = [], []
        for t, s, a in zip(*outputs, strict=True):
            p = t.detach().softmax(0)
            if -sum(float(v) * math.log(float(v)) for v in p) < self.limit:
                labels.append(-s.log_softmax(0)[int(p.argmax())])
                pulls.append(sum((t[k] - a[k]) ** 2 for k in range(CLASSES)) / CLASSES)
        self.sure += len(labels)
        self.unsure += len(x) - len(labels)
        if labels:
            self.step(sum(labels) / len(labels), self.anchor_weight * sum(pulls) / len(pulls))
        return prediction

    def let_move(self, labels):
        for layers in self.layers.values():
            for layer in layers.values():
                layer.labels = labels

    def step(self, of_student, of_teacher):
        teacher, student, _ = self.nets.values()
        grads = zip(
            torch.autograd.grad(of_student, [student.get_parameter(n) for n in self.names]),
            torch.autograd.grad(of_teacher, [teacher.get_parameter(n) for n in self.names]),
            strict=True,
        )
        self.optimizer.step([a + b for a, b in grads])
        for name in self.names:
            teacher.get_parameter(name).data = student.get_parameter(name).data.clone()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("resnet_bn", {"margin": 0.6}),
        ("mlp", {"margin": 0.9, "eta": 0.4, "gamma": 0.1, "anchor_weight": 5.0}),
    ],
    ids=["resnet", "mlp"],
)
def test_against_a_plain_loop(name, settings):
    settings = {"lr": 5e-3, "eta": 0.01, "gamma": 0.0, "anchor_weight": 0.5, **settings}
    live = TRIBE(make_net(name).double(), **settings)
    by_hand = Slow(make_net(name).double().eval(), **settings)
    for x in make_batches(name, SIZES):
        torch.testing.assert_close(live(x.double()), by_hand(x.double()), rtol=1e-6, atol=1e-6)
    assert min(by_hand.sure, by_hand.unsure) > 5  # some of both
    for who, theirs in by_hand.nets.items():
        ours = live.get_submodule(who)
        slow.same_balance(ours, by_hand.layers[who])
        for path, wanted in theirs.named_parameters():
            got = ours.get_parameter(path)
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6, msg=path)


def test_what_is_shared_and_what_moves():
    """The student has no weights of its own; the source has only those that move elsewhere."""
    net = make_net("resnet_bn")
    live = TRIBE(net, margin=1.0, freeze=["layer4"])
    for x in make_batches("resnet_bn"):
        live(x)
    moves = slow.affine(live.model, ["layer4"])
    for path, p in live.model.named_parameters():
        source, given = live.source.get_parameter(path), net.get_parameter(path)
        assert live.student.get_parameter(path) is p
        assert (source is p) == (path not in moves)
        assert torch.equal(source, given)
        assert torch.equal(p, given) == (path not in moves)
        assert source.grad is None or source is p
    means = {
        who: live.get_submodule(who).layer4[0].bn1.running_mean
        for who in ("model", "student", "source")
    }
    for mean in means.values():
        assert not torch.equal(mean, net.layer4[0].bn1.running_mean)
    assert not torch.equal(means["model"], means["student"])  # which sees other images
    assert not torch.equal(means["model"], means["source"])  # whose weights stay


@pytest.mark.parametrize("again", [copy.deepcopy, nn.Module.double], ids=["copied", "converted"])
def test_weights_stay_shared(again):
    live = again(TRIBE(make_net("mlp"), margin=1.0))
    (x,) = make_batches("mlp", (6,))
    live(x.to(live.dtype))
    for a, b in zip(live.model.parameters(), live.student.parameters(), strict=True):
        assert a is b


def test_without_a_sure_image_it_is_balanced_bn():
    """No step, nothing that is not a number; the statistics still move."""
    net, batches = make_net("resnet_bn"), make_batches("resnet_bn")
    live, statistics = TRIBE(net, margin=1e-9), BalancedBN(net)
    for x in batches:
        assert torch.equal(live(x), statistics(x))
    assert not live.optimizer.state
    assert not torch.equal(live.student.bn1.class_mean, net.bn1.running_mean.repeat(CLASSES, 1))
    for path, p in live.model.named_parameters():
        assert torch.equal(p, net.get_parameter(path))


@pytest.mark.parametrize(
    ("classes", "share"), [(10, 0.05), (11, 0.2), (100, 0.2), (101, 0.4), (1000, 0.4)]
)
def test_who_is_sure_depends_on_the_number_of_classes(classes, share):
    live = TRIBE(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2), nn.Linear(2, classes)))
    assert live._limit == pytest.approx(share * math.log(classes))
    assert live.margin is None


def test_the_label_distribution_reaches_all_three():
    net = make_net("mlp")
    inner = TRIBE(attach(net, make_adapter(net)), margin=1.0)
    live = LabelAware(inner, EMA(CLASSES, alpha=0.3))
    uniform = torch.full((CLASSES,), 1 / CLASSES)
    for x in make_batches("mlp"):
        before = live.prior
        live(x)
        heads = [head for _, head in adapted_heads(live)]
        assert len(heads) == 3
        for head in heads:
            torch.testing.assert_close(head.prior, before)
    assert not torch.allclose(before, uniform)


def test_the_pull_holds_the_weights_back():
    net, batches = make_net("resnet_bn"), make_batches("resnet_bn", (8,) * 10)

    def distance(anchor_weight):
        live = TRIBE(net, lr=5e-3, margin=1.0, anchor_weight=anchor_weight)
        for x in batches:
            live(x)
        with torch.no_grad():
            return float((live.model(batches[0]) - live.source(batches[0])).square().mean())

    assert distance(100.0) < 0.5 * distance(0.0)


@pytest.mark.parametrize(("margin", "backwards"), [(1.0, 2), (1e-9, 0)])
def test_the_passes_that_the_card_tells(margin, backwards):
    live, (x,) = TRIBE(make_net("mlp"), margin=margin), make_batches("mlp", (6,))
    passes = []

    def count(who, output):
        passes.append(who)
        if output.requires_grad:
            output.register_hook(lambda _: passes.append(f"back through {who}"))

    for who in ("model", "student", "source"):
        live.get_submodule(who).register_forward_hook(lambda *a, who=who: count(who, a[2]))
    live(x)
    assert sorted(passes[:4]) == ["model", "model", "source", "student"]
    assert sorted(passes[4:]) == ["back through model", "back through student"][:backwards]


@pytest.mark.parametrize("name", ["resnet_bn", "mlp"])
def test_single_images(name):
    live = TRIBE(make_net(name), margin=1.0, lr=0.01)
    for x in make_batches(name, (1,) * 6):
        assert live(x).isfinite().all()


def test_layers_without_weights_and_others():
    net = nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(12, affine=False), nn.Linear(12, 4), nn.LayerNorm(4)
    )
    live = TRIBE(net.eval(), margin=1.0)
    live(torch.rand(4, 3, 2, 2))
    assert len(live.optimizer.param_groups[0]["params"]) == 2
    assert sum(isinstance(m, BalancedNorm) for m in live.modules()) == 3
    assert not torch.equal(live.model[3].weight, live.source[3].weight)


def test_a_step_that_overflows_is_refused():
    live, (x,) = TRIBE(make_net("mlp"), margin=1.0), make_batches("mlp", (6,))
    before = live.state()
    for group in live.optimizer.param_groups:
        group["lr"] = 1e39  # infinite in single precision
    with pytest.raises(BatchError, match="the weights after the step, must be finite"):
        live(x)
    assert all(torch.equal(t, before[n]) for n, t in live.state().items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eta": 2}, "eta of balanced statistics, must be above 0, at most 1"),
        ({"gamma": 2}, "gamma of balanced statistics, must be from 0 to 1"),
        ({"margin": 0}, "margin of tribe, must be above 0, got 0"),
        ({"margin": float("nan")}, "margin of tribe, must be above 0"),
        ({"anchor_weight": -1}, "anchor_weight of tribe, must be at least 0 and finite"),
        ({"lr": 0}, "lr of the optimiser, must be above 0"),
        ({"optim": "lbfgs"}, "optim of a method, must be one of 'adam', 'sgd'"),
        ({"freeze": ["layer44"]}, "Did you mean 'layer4'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        TRIBE(make_net("resnet_bn"), **settings)


def test_what_it_cannot_use():
    with pytest.raises(ModelError, match=r"normalisation layers of .* for TRIBE, .* got IABN"):
        TRIBE(make_net("resnet_iabn"))
    live = TRIBE(nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 4)))
    with pytest.raises(BatchError, match="images"):
        live(torch.rand(4, 12))
