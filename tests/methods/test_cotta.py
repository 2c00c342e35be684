"""CoTTA against a plain loop over three networks."""

import copy

import pytest
import torch
from torch import nn

from tests.methods import slow
from tests.toys import make_adapter, make_batches, make_net
from twoshift.adapters import attach
from twoshift.errors import BatchError, ModelError, SettingError
from twoshift.methods import cotta
from twoshift.methods._views import strong_view
from twoshift.methods.cotta import CoTTA, cross_entropy

SIZES = (6, 5, 6, 2, 6, 4, 6, 3, 6, 5)
SETTINGS = {"lr": 2e-3, "views": 3, "restore": 0.05, "teacher_momentum": 0.9}


def weights(net):
    return {n: p for n, p in net.named_parameters() if n.split(".")[-1] in ("weight", "bias")}


def slow_loss(logits, target, both_ways):
    total = 0
    for z, t in zip(logits, target, strict=True):
        p, q = z.exp() / z.exp().sum(), t.exp() / t.exp().sum()
        there, back = -(q * p.log()).sum(), -(p * q.log()).sum()
        total = total + (0.5 * there + 0.5 * back if both_ways else there)
    return total / len(logits)


class Slow:
    """Student, teacher and anchor, one tensor and one sample at a time."""

    def __init__(self, net, lr, views, restore, teacher_momentum, threshold, loss="cifar"):
        self.views, self.restore, self.keep = views, restore, teacher_momentum
        self.threshold, self.loss = threshold, loss
        slow.batch_norms_in_training(net)
        self.student, self.teacher, self.anchor = net, copy.deepcopy(net), copy.deepcopy(net)
        self.optimizer = slow.Adam(list(weights(net).values()), lr)
        self.generator, self.confidences = torch.Generator(), []

    def __call__(self, x):
        with torch.no_grad():
            rows = self.anchor(x).softmax(1)
            self.confidences.append(sum(float(row.max()) for row in rows) / len(x))
            if self.confidences[-1] < self.threshold:
                views = [self.teacher(strong_view(x, self.generator)) for _ in range(self.views)]
                target = torch.stack(views).mean(0)
            else:
                target = self.teacher(x)
        student, teacher = weights(self.student), weights(self.teacher)
        loss = slow_loss(self.student(x), target, self.loss == "imagenet")
        self.optimizer.step(torch.autograd.grad(loss, list(student.values())))
        for name, p in teacher.items():
            p.data = self.keep * p.data + (1 - self.keep) * student[name].data
        source, count = weights(self.anchor), sum(p.numel() for p in student.values())
        draws = iter(torch.rand(count, generator=self.generator).tolist())
        for name, p in student.items():
            for i in range(p.numel()):
                if next(draws) < self.restore:
                    p.data.view(-1)[i] = source[name].data.view(-1)[i]
        return target


@pytest.mark.parametrize(
    ("name", "loss"), [("resnet_bn", "cifar"), ("resnet_iabn", "imagenet"), ("vit", "cifar")]
)
def test_against_a_plain_loop(name, loss):
    batches = [x.double() for x in make_batches(name, SIZES)]
    net = make_net(name).double()  # Adam enlarges the last bits of gradients that are nearly zero
    anchor = copy.deepcopy(net)
    slow.batch_norms_in_training(anchor)
    with torch.no_grad():
        threshold = float(anchor(batches[0]).softmax(1).amax(1).mean()) + 1e-3
    live = CoTTA(net, confidence_threshold=threshold, loss=loss, **SETTINGS)
    by_hand = Slow(net, threshold=threshold, loss=loss, **SETTINGS)
    for x in batches:
        torch.testing.assert_close(live(x), by_hand(x), rtol=1e-6, atol=1e-6)
    assert 0 < sum(c < threshold for c in by_hand.confidences) < len(batches)  # both kinds
    for ours, theirs in (
        (live.model, by_hand.student),
        (live.teacher, by_hand.teacher),
        (live.anchor, by_hand.anchor),
    ):
        for path, wanted in theirs.named_parameters():
            got = ours.get_parameter(path)
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6, msg=path)
    assert torch.equal(live.generator.get_state(), by_hand.generator.get_state())


def test_views_are_made_only_where_the_anchor_is_unsure(monkeypatch):
    made = []
    monkeypatch.setattr(cotta, "strong_view", lambda x, g: made.append(x) or strong_view(x, g))
    (x,) = make_batches("resnet_bn", (4,))
    CoTTA(make_net("resnet_bn"), confidence_threshold=0.0)(x)
    assert not made
    CoTTA(make_net("resnet_bn"), confidence_threshold=1.0, views=5)(x)
    assert len(made) == 5


def test_one_decision_for_the_whole_batch():
    class Rows(nn.Module):
        """The first pixels are the logits."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x[:, 0, 0] * self.weight

    sure, unsure = torch.tensor([20.0, 0.0]), torch.zeros(2)  # confidence 1 and 0.5
    for images, seen in (([sure, sure, unsure], 0), ([sure, unsure, unsure], 1)):
        live = CoTTA(Rows(), confidence_threshold=0.75, views=1)
        x = torch.stack(images).reshape(3, 1, 1, 2)
        first = live(x)
        assert torch.equal(first, x[:, 0, 0]) == (seen == 0)


def test_the_share_that_falls_back_is_the_stated_one():
    net = make_net("resnet_bn")
    live, source = CoTTA(net, restore=0.1), weights(net)
    with torch.no_grad():
        for p in weights(live.model).values():
            p += 1
        live._restore()
    back = torch.cat([(p == source[n]).flatten() for n, p in weights(live.model).items()])
    deviation = (0.1 * 0.9 / len(back)) ** 0.5
    assert abs(back.double().mean() - 0.1) < 4 * deviation


def test_all_or_nothing_falls_back():
    net, batches = make_net("resnet_bn"), make_batches("resnet_bn")
    live, source = CoTTA(net, restore=1.0, confidence_threshold=0.0), weights(net)
    for x in batches:
        live(x)
        assert all(torch.equal(p, source[n]) for n, p in weights(live.model).items())
        assert not all(torch.equal(p, source[n]) for n, p in weights(live.teacher).items())
    live = CoTTA(net, restore=0.0, confidence_threshold=0.0)
    for x in batches:
        live(x)
    assert torch.equal(live.generator.get_state(), torch.Generator().get_state())
    moved = torch.cat([(p != source[n]).flatten() for n, p in weights(live.model).items()])
    assert moved.double().mean() > 0.95


@pytest.mark.parametrize("momentum", [0.0, 0.3, 1.0])
def test_the_teacher_is_a_moving_average(momentum):
    net = make_net("resnet_bn")
    live = CoTTA(net, lr=0.01, teacher_momentum=momentum, restore=0.0, views=2)
    expected = {n: p.detach().clone() for n, p in weights(net).items()}
    for x in make_batches("resnet_bn"):
        live(x)
        for n, p in weights(live.model).items():
            expected[n] = momentum * expected[n] + (1 - momentum) * p.detach()
            torch.testing.assert_close(weights(live.teacher)[n].data, expected[n])


def test_both_losses():
    g = torch.Generator().manual_seed(0)
    logits, target = (torch.randn(6, 4, generator=g, dtype=torch.float64) for _ in range(2))
    for symmetric in (False, True):
        got = cross_entropy(logits, target, symmetric).mean()
        torch.testing.assert_close(got, slow_loss(logits, target, symmetric))


def test_the_prediction_is_the_teachers():
    """The first one is that of the source weights, under the batch's statistics."""
    net, x = make_net("resnet_bn"), make_batches("resnet_bn")[0]
    got = CoTTA(net, confidence_threshold=0.0)(x)
    slow.batch_norms_in_training(net)
    torch.testing.assert_close(got, net(x).detach())


@pytest.mark.parametrize("threshold", [0.0, 1.0], ids=["sure", "unsure"])
def test_raw_logits_are_the_teachers_too(threshold):
    """Of its original head, averaged over the same views as the prediction."""
    net, x = make_net("resnet_bn"), make_batches("resnet_bn")[0]
    live = CoTTA(attach(net, make_adapter(net)), confidence_threshold=threshold, views=3)
    scores = live.adapt(x)
    slow.batch_norms_in_training(net)
    generator = torch.Generator()
    views = [strong_view(x, generator) for _ in range(3)] if threshold else [x]
    expected = sum(net(view).detach() for view in views) / len(views)
    torch.testing.assert_close(scores.raw, expected)
    assert not torch.allclose(scores.logits, expected, atol=1e-2)


def test_everything_called_weight_or_bias_moves_and_nothing_else():
    net = make_net("vit")
    live = CoTTA(net, restore=0.0, views=2, freeze=["blocks.1", "norm"])
    for x in make_batches("vit"):
        live(x)
    for part in (live.model, live.teacher):
        for path, p in part.named_parameters():
            frozen = path.startswith(("blocks.1.", "norm.")) or path == "positions"
            assert torch.equal(p, net.get_parameter(path)) == frozen, path
    for path, p in live.anchor.named_parameters():
        assert torch.equal(p, net.get_parameter(path)), path
    assert live.settings()["freeze"] == ["blocks.1", "norm"]


def test_the_own_weights_of_an_adapted_head_are_trained_the_adapter_is_not():
    net = make_net("resnet_bn")
    live = CoTTA(attach(net, make_adapter(net)), restore=0.0, confidence_threshold=0.0)
    live(make_batches("resnet_bn")[0])
    for part in (live.model, live.teacher):
        assert not torch.equal(part.fc.head.weight, net.fc.weight)
        assert not torch.equal(part.fc.head.bias, net.fc.bias)
        assert not any(p.requires_grad for p in part.fc.adapter.parameters())


def test_single_images():
    live = CoTTA(make_net("resnet_bn"), lr=0.01, views=2)
    for x in make_batches("resnet_bn", (1,) * 6):
        assert live(x).isfinite().all()
    assert all(p.isfinite().all() for p in live.parameters())


def test_reset_clears_teacher_and_momentum():
    net, batches = make_net("resnet_bn"), make_batches("resnet_bn")
    live = CoTTA(net, lr=0.01, views=2)
    first = live(batches[0])
    live(batches[1])
    assert live.optimizer.state
    live.reset()
    assert not live.optimizer.state
    for part in (live.model, live.teacher):
        assert all(torch.equal(p, weights(net)[n]) for n, p in weights(part).items())
    assert torch.equal(live(batches[0]), first)


def test_channels_last_stays():
    net = make_net("resnet_bn").to(memory_format=torch.channels_last)
    live, plain = (CoTTA(n, views=2) for n in (net, make_net("resnet_bn")))
    (x,) = make_batches("resnet_bn", (6,))
    got = live(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(got, plain(x), rtol=1e-4, atol=1e-4)
    live.reset()
    for part in (live.model, live.teacher, live.anchor):
        assert part.conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_step_that_overflows_is_refused_and_taken_back():
    net = nn.Sequential(nn.Flatten(), nn.Linear(3, 2, bias=False))
    net[1].weight.data = torch.tensor([[1e-25], [-1e-25]]).expand(2, 3).clone()
    live = CoTTA(net, optim="sgd", lr=1e5, views=1, confidence_threshold=1.0)
    before = live.state()
    with pytest.raises(BatchError, match="weights after the step, must be finite"):
        live(torch.tensor([1e25, 2e25, -1e25]).reshape(1, 3, 1, 1))
    assert torch.equal(live.state()["model.1.weight"], before["model.1.weight"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"confidence_threshold": 1.5},
            "confidence_threshold of cotta, must be from 0 to 1, got 1.5",
        ),
        ({"restore": -0.1}, "restore of cotta, must be from 0 to 1"),
        ({"teacher_momentum": float("nan")}, "teacher_momentum of cotta, must be from 0 to 1"),
        ({"views": 0}, "views of cotta, must be a whole number from 1, got 0"),
        ({"views": 2.5}, "views of cotta, must be a whole number"),
        ({"loss": "mse"}, "loss of cotta, must be one of .*imagenet.*, got 'mse'"),
        ({"lr": 0}, "lr of the optimiser, must be above 0"),
        ({"optim": "lbfgs"}, "optim of a method, must be one of 'adam', 'sgd'"),
        ({"freeze": ["layer44"]}, "Did you mean 'layer4'"),
        ({"freeze": [""]}, "has no module ''"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        CoTTA(make_net("resnet_bn"), **settings)


def test_nothing_to_train():
    with pytest.raises(ModelError, match="got all of them frozen"):
        CoTTA(make_net("mlp"), freeze=["body", "head"])


def test_vectors_are_refused_at_once():
    live = CoTTA(nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4)), confidence_threshold=0.0)
    with pytest.raises(BatchError, match="images"):
        live(torch.rand(4, 12))
