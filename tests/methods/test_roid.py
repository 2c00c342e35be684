"""ROID against a plain loop over samples, and the correction of its predictions."""

import copy
import math

import pytest
import torch

from tests.methods import slow
from tests.toys import CLASSES, make_adapter, make_batches, make_net
from twoshift import estimators
from twoshift.adapters import attach, condition, logit_adapter
from twoshift.errors import BatchError, ModelError, SettingError
from twoshift.methods import ROID, LabelAware, roid
from twoshift.methods._views import strong_view
from twoshift.methods.roid import CORRECTIONS, likelihood_ratio, smoothed_prior

SIZES = (8, 5, 1, 8, 3, 9, 8, 4, 7, 6)


def softmax(row):
    e = (row - row.detach().max()).exp()
    return e / e.sum()


def stretched(values):
    low, high = min(values), max(values)
    return [0.0 if high == low else (v - low) / (high - low) for v in values]


def ratio_loss(p):
    total = 0
    for share in p:
        share = torch.clamp(share, max=0.99)
        total = total - share * torch.log(share / (1 - share) + 1e-5)
    return total


class Slow:
    """One sample and one weight at a time."""

    def __init__(self, net, lr=1e-3, correction="probabilities", ensembling=0.99, momentum=0.9):
        self.net, self.correction, self.ensembling = net, correction, ensembling
        self.momentum = momentum
        slow.batch_norms_in_training(net)
        self.weights = list(slow.affine(net).values())
        self.source = [w.detach().clone() for w in self.weights]
        self.optimizer = slow.Adam(self.weights, lr)
        self.average = [1 / CLASSES] * CLASSES
        self.generator, self.ignored = torch.Generator(), 0

    def sample_weights(self, probs):
        diversity, certainty = [], []
        for p in probs:
            dot = sum(a * b for a, b in zip(self.average, p, strict=True))
            lengths = [math.sqrt(sum(v * v for v in vector)) for vector in (self.average, p)]
            diversity.append(1 - dot / (lengths[0] * lengths[1]))
            certainty.append(sum(v * math.log(v) for v in p))
        diversity, certainty = stretched(diversity), stretched(certainty)
        limit = sum(diversity) / len(diversity)
        pairs = zip(diversity, certainty, strict=True)
        return [0.0 if d < limit else math.exp(d * c / (1 / 3)) for d, c in pairs]

    def __call__(self, x):
        logits = self.net(x)
        probs = [softmax(row) for row in logits]
        weights = self.sample_weights([p.tolist() for p in probs])
        rows = [i for i, w in enumerate(weights) if w]
        self.ignored += len(x) - len(rows)
        views = self.net(strong_view(x[rows], self.generator))
        loss = 0
        for i, view in zip(rows, views, strict=True):
            p, q = probs[i], softmax(view)
            both = -0.5 * (p * q.log()).sum() - 0.5 * (q * p.log()).sum()
            loss = loss + weights[i] * (ratio_loss(p) + both)
        self.optimizer.step(torch.autograd.grad(loss / len(x), self.weights))
        for w, s in zip(self.weights, self.source, strict=True):
            w.data = self.ensembling * w.data + (1 - self.ensembling) * s
        mean = sum(p.detach() for p in probs) / len(x)
        self.average = [
            self.momentum * a + (1 - self.momentum) * m
            for a, m in zip(self.average, mean.tolist(), strict=True)
        ]
        return self.corrected(logits.detach(), mean)

    def corrected(self, logits, mean):
        if self.correction == "none":
            return logits
        smooth = max(1 / len(logits), 1 / CLASSES) / max(mean.tolist())
        prior = (mean + smooth) / (1 + smooth * CLASSES)
        if self.correction == "logits":
            return logits * prior
        shares = [softmax(row) * prior for row in logits]
        return torch.stack([torch.log(s / s.sum()) for s in shares])


@pytest.mark.parametrize(
    ("name", "correction"),
    [
        ("resnet_bn", "probabilities"),
        ("resnet_iabn", "logits"),
        ("resnet_gn", "none"),
        ("vit", "logits"),
    ],
)
def test_against_a_plain_loop(name, correction):
    net = make_net(name).double()  # Adam enlarges the last bits of gradients that are nearly zero
    settings = {"lr": 3e-3, "correction": correction, "ensembling": 0.9}
    live, by_hand = ROID(net, **settings), Slow(copy.deepcopy(net), **settings)
    for x in make_batches(name, SIZES):
        torch.testing.assert_close(live(x.double()), by_hand(x.double()), rtol=1e-5, atol=1e-5)
    assert 0 < by_hand.ignored < sum(SIZES)
    got = live.average.tolist()
    torch.testing.assert_close(got, by_hand.average, rtol=1e-6, atol=1e-6)
    for path, wanted in slow.affine(by_hand.net).items():
        weight = live.model.get_parameter(path)
        torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-5, msg=path)
        assert not torch.equal(weight, net.get_parameter(path))


def test_the_loss_falls_with_confidence_and_is_bounded():
    logits = torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0], [40.0, 0.0, 0.0]]).double()
    got = likelihood_ratio(logits)
    expected = torch.stack([ratio_loss(softmax(row)) for row in logits])
    torch.testing.assert_close(got, expected)
    assert got[0] > got[1] > got[2] > -5
    logits.requires_grad_()
    likelihood_ratio(logits).sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_single_images(correction):
    live = ROID(make_net("resnet_bn"), lr=0.01, correction=correction)
    for x in make_batches("resnet_bn", (1,) * 6):
        assert live(x).isfinite().all()
    assert all(p.isfinite().all() for p in live.parameters())


def test_equal_images_all_teach_with_weight_one():
    live, (x,) = ROID(make_net("resnet_bn")), make_batches("resnet_bn", (1,))
    assert live._weights(live.model(x).detach().repeat(3, 1)).tolist() == [1.0] * 3


def test_the_correction_makes_frequent_classes_more_likely():
    """A sample between two classes goes to the one that the batch has more of."""
    logits = torch.tensor([[3.0, 0.0, 0.0]] * 6 + [[1.0, 1.0, 0.0]])
    prior = smoothed_prior(logits)
    torch.testing.assert_close(prior.sum(), torch.tensor(1.0))
    assert prior[0] > prior[1] > prior[2] > 0
    single = smoothed_prior(torch.tensor([[50.0, 0.0]]))
    torch.testing.assert_close(single, torch.tensor([2 / 3, 1 / 3]))  # never taken for granted


def test_the_corrected_logits_are_log_probabilities():
    net, (x,) = make_net("resnet_bn"), make_batches("resnet_bn", (8,))
    plain = ROID(net, correction="none")(x)
    got = ROID(net)(x)
    torch.testing.assert_close(got.exp().sum(1), torch.ones(8))
    expected = plain.softmax(1) * smoothed_prior(plain)
    torch.testing.assert_close(got.softmax(1), expected / expected.sum(1, keepdim=True))
    torch.testing.assert_close(ROID(net, correction="logits")(x), plain * smoothed_prior(plain))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_raw_logits_are_never_corrected(correction):
    """An estimator would otherwise count the labels of the batch twice."""
    net, (x,) = make_net("resnet_bn"), make_batches("resnet_bn", (8,))
    live = ROID(attach(net, make_adapter(net)), correction=correction)
    condition(live, [0.4, 0.3, 0.1, 0.1, 0.1])
    scores = live.adapt(x)
    slow.batch_norms_in_training(net)
    torch.testing.assert_close(scores.raw, net(x).detach(), rtol=1e-4, atol=1e-5)
    assert (scores.features is None) == (correction != "none")


def test_without_correction_an_estimate_of_this_batch_adjusts_it():
    net, (x,) = make_net("resnet_bn"), make_batches("resnet_bn", (8,))
    method = ROID(attach(net, logit_adapter(net)), correction="none")
    live = LabelAware(method, estimators.create("paced", CLASSES))
    got, plain = live(x), ROID(net, correction="none")(x)
    torch.testing.assert_close(
        got.log_softmax(1), (plain + live.estimator.present.log()).log_softmax(1)
    )


@pytest.mark.parametrize("ensembling", [0.0, 1.0])
def test_the_ends_of_ensembling(ensembling):
    net = make_net("resnet_bn")
    live = ROID(net, lr=0.01, ensembling=ensembling)
    for x in make_batches("resnet_bn"):
        live(x)
    moved = [not torch.equal(p, net.get_parameter(n)) for n, p in live.model.named_parameters()]
    assert any(moved) == (ensembling == 1)


def test_only_images_that_teach_are_viewed_again(monkeypatch):
    seen = []
    monkeypatch.setattr(roid, "strong_view", lambda x, g: seen.append(len(x)) or strong_view(x, g))
    ROID(make_net("resnet_bn"))(make_batches("resnet_bn", (16,))[0])
    assert 0 < seen[0] < 16


def test_frozen_layers_stay():
    net = make_net("resnet_bn")
    live = ROID(net, lr=0.01, freeze=["layer4"])
    live(make_batches("resnet_bn")[0])
    for path in slow.affine(net):
        same = torch.equal(live.model.get_parameter(path), net.get_parameter(path))
        assert same == path.startswith("layer4.")
    assert live.settings()["freeze"] == ["layer4"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    live = ROID(make_net("resnet_bn").to(dtype))
    for x in make_batches("resnet_bn"):
        assert live(x.to(dtype)).isfinite().all()
    assert all(p.isfinite().all() for p in live.parameters())
    assert live.average.dtype == dtype


def test_what_it_cannot_do_is_refused():
    net = make_net("resnet_bn")
    for wrong in (
        {"ensembling": 1.1},
        {"average_momentum": -0.1},
        {"sharpness": -1.0},
        {"correction": "prior"},
        {"lr": 0},
    ):
        with pytest.raises(SettingError):
            ROID(net, **wrong)
    with pytest.raises(ModelError, match="normalisation layers"):
        ROID(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2)))
    with pytest.raises(BatchError, match="images"):
        ROID(make_net("mlp"))(torch.rand(4, 192))
