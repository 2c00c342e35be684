"""RoTTA against a plain loop with slow layers and a memory of one list per class."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tests.methods import slow
from tests.toys import CLASSES, make_batches, make_net
from twoshift.errors import BatchError, ModelError, SettingError
from twoshift.methods import rotta
from twoshift.methods._views import strong_view
from twoshift.methods.rotta import Item, RobustBatchNorm, RoTTA, Rule, remember
from twoshift.models.norm import replace_module

SIZES = (6, 5, 8, 1, 7, 6, 3, 8, 4, 6)
SETTINGS = {"lr": 5e-3, "capacity": 9, "update_every": 7, "nu": 0.1, "alpha": 0.2}


class SlowNorm(nn.Module):
    """Channel by channel."""

    def __init__(self, layer, alpha):
        super().__init__()
        self.weight, self.bias, self.eps, self.alpha = layer.weight, layer.bias, layer.eps, alpha
        self.mean = [float(v) for v in layer.running_mean]
        self.var = [float(v) for v in layer.running_var]

    def forward(self, x):
        channels = []
        for c in range(x.shape[1]):
            values, mean, var = x[:, c], self.mean[c], self.var[c]
            if self.training:
                own = values.sum() / values.numel()
                spread = ((values - own) ** 2).sum() / values.numel()
                mean = (1 - self.alpha) * mean + self.alpha * own
                var = (1 - self.alpha) * var + self.alpha * spread
                self.mean[c], self.var[c] = mean.item(), var.item()
            normal = (values - mean) / (var + self.eps) ** 0.5
            channels.append(normal * self.weight[c] + self.bias[c])
        return torch.stack(channels, 1)


class SlowMemory:
    """One list per class; every sample grows older with each arrival."""

    def __init__(self, capacity, classes, lambda_t=1.0, lambda_u=1.0):
        self.capacity, self.classes = capacity, classes
        self.lambda_t, self.lambda_u = lambda_t, lambda_u
        self.lists = [[] for _ in range(classes)]

    def score(self, age, uncertainty):
        by_age = self.lambda_t / (1 + math.exp(-age / self.capacity))
        return by_age + self.lambda_u * uncertainty / math.log(self.classes)

    def add(self, image, label, uncertainty):
        if self.makes_room(label, self.score(0, uncertainty)):
            self.lists[label].append({"image": image, "entropy": uncertainty, "age": 0})
        for sample in self.all():
            sample["age"] += 1

    def makes_room(self, label, score):
        if len(self.lists[label]) < self.capacity / self.classes:
            if len(self.all()) < self.capacity:
                return True
            largest = max(len(samples) for samples in self.lists)
            among = [k for k in range(self.classes) if len(self.lists[k]) == largest]
        else:
            among = [label]
        worst = None
        for k in among:
            for i, sample in enumerate(self.lists[k]):
                this = self.score(sample["age"], sample["entropy"])
                if worst is None or this >= worst[0]:
                    worst = this, k, i
        if worst[0] <= score:
            return False
        del self.lists[worst[1]][worst[2]]
        return True

    def all(self):
        return [sample for samples in self.lists for sample in samples]


class Slow:
    """Student, teacher and memory."""

    def __init__(self, net, lr, capacity, update_every, nu, alpha, **lambdas):
        self.capacity, self.update_every, self.nu = capacity, update_every, nu
        self.names = list(slow.affine(net))
        for name, layer in list(net.named_modules()):
            if isinstance(layer, _BatchNorm):
                replace_module(net, name, SlowNorm(layer, alpha))
        self.student, self.teacher = net, copy.deepcopy(net)
        self.parameters = [net.get_parameter(n) for n in self.names]
        self.optimizer = slow.Adam(self.parameters, lr)
        self.memory = SlowMemory(capacity, CLASSES, **lambdas)
        self.generator, self.count = torch.Generator(), 0

    def __call__(self, x):
        with torch.no_grad():
            logits = self.teacher.eval()(x)
        for image, row in zip(x, logits.softmax(1), strict=True):
            h = -sum(float(p) * math.log(float(p)) for p in row)
            self.memory.add(image, int(row.argmax()), h)
            self.count += 1
            if self.count % self.update_every == 0:
                self.learn()
        return logits

    def learn(self):
        samples = self.memory.all()
        images = torch.stack([s["image"] for s in samples])
        view = strong_view(images, self.generator)
        for net in (self.student, self.teacher):
            for layer in net.modules():
                if isinstance(layer, SlowNorm):
                    layer.train()
        with torch.no_grad():
            target = self.teacher(images).softmax(1)
        losses = []
        for sample, row, wanted in zip(samples, self.student(view), target, strict=True):
            a = sample["age"] / self.capacity
            weight = math.exp(-a) / (1 + math.exp(-a))
            losses.append(-weight * (wanted * row.log_softmax(0)).sum())
        self.optimizer.step(torch.autograd.grad(sum(losses) / len(losses), self.parameters))
        for name, p in zip(self.names, self.parameters, strict=True):
            teacher = self.teacher.get_parameter(name)
            teacher.data = (1 - self.nu) * teacher.data + self.nu * p.data


@pytest.mark.parametrize(
    ("name", "settings"),
    [("resnet_bn", {}), ("mlp", {}), ("mlp", {"lambda_t": 0.3, "lambda_u": 4.0, "capacity": 4})],
    ids=["resnet", "mlp", "lambdas"],
)
def test_against_a_plain_loop(name, settings):
    settings = {**SETTINGS, **settings}
    batches = [x.double() for x in make_batches(name, SIZES)]
    live = RoTTA(make_net(name).double(), **settings)
    by_hand = Slow(make_net(name).double().eval(), **settings)
    for x in batches:
        torch.testing.assert_close(live(x), by_hand(x), rtol=1e-6, atol=1e-6)
        wanted = by_hand.memory.all()
        assert torch.equal(live.memory["images"], torch.stack([s["image"] for s in wanted]))
        assert (live.seen - live.memory["born"]).tolist() == [s["age"] for s in wanted]
        entropies = torch.tensor([s["entropy"] for s in wanted], dtype=torch.float64)
        torch.testing.assert_close(live.memory["uncertainty"], entropies)
        labels = [k for k, samples in enumerate(by_hand.memory.lists) for _ in samples]
        assert live.memory["label"].tolist() == labels
    for ours, theirs in ((live.model, by_hand.student), (live.teacher, by_hand.teacher)):
        for path, wanted in theirs.named_parameters():
            got = ours.get_parameter(path)
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6, msg=path)
        for path, layer in theirs.named_modules():
            if isinstance(layer, SlowNorm):
                mean, var = ours.get_submodule(path).statistics()
                torch.testing.assert_close(mean.tolist(), layer.mean, rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(var.tolist(), layer.var, rtol=1e-6, atol=1e-6)
    assert by_hand.count // settings["update_every"] >= 7
    source = slow.affine(make_net(name))
    for path, p in slow.affine(live.teacher).items():
        assert not torch.equal(p, source[path].double()), path


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("capacity", [1, 7, 12])
def test_the_memory_alone_on_a_long_skewed_stream(seed, capacity):
    g = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(torch.tensor([0.7, 0.2, 0.06, 0.04]), 300, True, generator=g)
    entropies = torch.rand(300, generator=g).mul(4).round().div(4).tolist()  # many are equal
    by_hand, items = SlowMemory(capacity, 4), []
    rule = Rule(capacity, capacity / 4, 1.0, 1.0 / math.log(4))
    for i, (label, h) in enumerate(zip(labels.tolist(), entropies, strict=True)):
        remember(items, Item(i, label, h, born=i), rule)
        by_hand.add(i, label, h)
        assert [item.image for item in items] == [s["image"] for s in by_hand.all()]
        assert len(items) <= capacity
    if capacity == 12:
        assert [sum(item.label == k for item in items) for k in range(4)] == [3, 3, 3, 3]


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5), (6, 4, 3, 3), (1, 4), (2, 4, 2, 2, 2)])
def test_the_layer_by_value_and_gradient(shape):
    g = torch.Generator().manual_seed(0)
    layer = RobustBatchNorm(4, momentum=0.3).double()
    layer.running_mean.normal_(generator=g)
    layer.running_var.uniform_(0.5, 2, generator=g)
    reference = SlowNorm(layer, 0.3)
    for train in (False, True, True, False):
        x = torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()
        got, wanted = layer.train(train)(x), reference.train(train)(x)
        torch.testing.assert_close(got, wanted)
        seed = torch.randn(shape, generator=g, dtype=torch.float64)
        inputs = [x, layer.weight, layer.bias]
        ours = torch.autograd.grad(got, inputs, seed)
        for a, b in zip(ours, torch.autograd.grad(wanted, inputs, seed), strict=True):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(layer.running_mean.tolist(), reference.mean)
        torch.testing.assert_close(layer.running_var.tolist(), reference.var)


def test_it_is_the_source_model_until_the_first_update():
    net, batches = make_net("resnet_bn"), make_batches("resnet_bn")
    live = RoTTA(net, update_every=20)
    for x in batches[:3]:
        torch.testing.assert_close(live(x), net(x).detach())
    live(batches[3])  # the update is in here, after the prediction
    assert not torch.equal(live(batches[0]), net(batches[0]))


def test_the_batches_do_not_matter_until_an_update():
    """Samples count, not batches: one by one the same is remembered and learnt."""
    (x,) = make_batches("resnet_bn", (8,))
    together, alone = (
        RoTTA(make_net("resnet_bn").double(), capacity=6, update_every=8) for _ in range(2)
    )
    logits = together(x.double())
    torch.testing.assert_close(torch.cat([alone(row[None].double()) for row in x]), logits)
    assert torch.equal(together.memory["images"], alone.memory["images"])
    for (_, a), (_, b) in zip(together.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_only_norm_weights_move_and_frozen_ones_stay():
    net = make_net("resnet_bn")
    live = RoTTA(net, capacity=6, update_every=4, freeze=["layer4"])
    for x in make_batches("resnet_bn"):
        live(x)
    for part in (live.model, live.teacher):
        moves = slow.affine(part, ["layer4"])
        for path, p in part.named_parameters():
            assert torch.equal(p, net.get_parameter(path)) == (path not in moves), path
        assert not torch.equal(part.layer4[0].bn1.running_mean, net.layer4[0].bn1.running_mean)
        assert not any(layer.training for layer in part.modules())


def test_the_memory_never_aliases_the_callers_batch():
    live, (x,) = RoTTA(make_net("resnet_bn")), make_batches("resnet_bn", (4,))
    live(x)
    kept = live.memory["images"].clone()
    x.zero_()
    assert torch.equal(live.memory["images"], kept)


def test_reset_empties_the_memory_and_clears_the_optimiser():
    net, batches = make_net("resnet_bn"), make_batches("resnet_bn")
    live = RoTTA(net, capacity=6, update_every=4)
    for x in batches:
        live(x)
    assert live.optimizer.state
    live.reset()
    assert live.memory == {}
    assert live.seen == 0
    assert not live.optimizer.state
    for part in (live.model, live.teacher):
        assert torch.equal(part.bn1.weight, net.bn1.weight)
        assert torch.equal(part.bn1.running_var, net.bn1.running_var)


@pytest.mark.parametrize("name", ["resnet_bn", "mlp"])
def test_a_memory_of_one_and_single_images(name):
    live = RoTTA(make_net(name), capacity=1, update_every=1, lr=0.01)
    for x in make_batches(name, (1,) * 6):
        assert live(x).isfinite().all()
        assert len(live.memory["images"]) == 1


def test_several_updates_in_one_batch(monkeypatch):
    seen = []
    monkeypatch.setattr(rotta, "strong_view", lambda x, g: seen.append(len(x)) or x)
    live = RoTTA(make_net("mlp"), capacity=100, update_every=3)
    live(make_batches("mlp", (8,))[0])
    live(make_batches("mlp", (2,))[0])
    assert seen == [3, 6, 9]


def test_layers_without_weights_and_others():
    net = nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(12, affine=False), nn.Linear(12, 4), nn.LayerNorm(4)
    )
    live = RoTTA(net.eval(), capacity=4, update_every=2)
    live(torch.rand(4, 3, 2, 2))
    assert len(live.optimizer.param_groups[0]["params"]) == 2
    assert not torch.equal(live.teacher[1].running_mean, net[1].running_mean)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": 0}, "capacity of rotta, must be a whole number from 1, got 0"),
        ({"update_every": 1.5}, "update_every of rotta, must be a whole number from 1"),
        ({"nu": 1.1}, "nu of rotta, must be from 0 to 1, got 1.1"),
        ({"alpha": float("nan")}, "alpha of rotta, must be from 0 to 1"),
        ({"lambda_t": -1}, "lambda_t of rotta, must be at least 0 and finite"),
        ({"lambda_u": float("inf")}, "lambda_u of rotta, must be at least 0 and finite"),
        ({"lr": 0}, "lr of the optimiser, must be above 0"),
        ({"optim": "lbfgs"}, "optim of a method, must be one of 'adam', 'sgd'"),
        ({"freeze": ["layer44"]}, "Did you mean 'layer4'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        RoTTA(make_net("resnet_bn"), **settings)


def test_models_it_cannot_use():
    with pytest.raises(ModelError, match=r"normalisation layers of .* for rotta, .* got IABN"):
        RoTTA(make_net("resnet_iabn"))
    with pytest.raises(ModelError, match="'1' for rotta, must be with running stat"):
        RoTTA(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4, track_running_stats=False)))


def test_vectors_are_refused_at_once():
    live = RoTTA(nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4)))
    with pytest.raises(BatchError, match="images"):
        live(torch.rand(4, 12))
