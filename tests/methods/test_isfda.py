"""Online ISFDA against loops over samples, classes and pairs."""

import math

import pytest
import torch
from torch import nn

from tests.methods import slow
from tests.toys import make_adapter, make_batches, make_net
from twoshift.adapters import attach
from twoshift.errors import ModelError, SettingError
from twoshift.methods.isfda import ISFDA, class_distances, prototype_labels
from twoshift.models.head import features

SIZES = (8, 5, 8, 3, 8, 1, 6, 8, 2, 8)
HAND = {"adam": slow.Adam, "sgd": slow.SGD}
WEIGHTS = {"ce_weight": 0.3, "secondary_weight": 0.1, "intra_weight": 1.0, "inter_weight": 0.1}
OTHER_WEIGHTS = {"ce_weight": 1, "secondary_weight": 0.7, "intra_weight": 0.4, "inter_weight": 2}


def cosine(a, b):
    length = max(float(sum(v * v for v in a)) ** 0.5 * float(sum(v * v for v in b)) ** 0.5, 1e-12)
    return float(sum(v * w for v, w in zip(a, b, strict=True))) / length


def slow_labels(points, probs):
    """Nearest centre among the classes predicted; the centres soft first, then of the labels."""
    points = [[*row, 1.0] for row in points.tolist()]
    points = [[v / math.hypot(*row) for v in row] for row in points]
    weights = probs.tolist()
    there = {row.index(max(row)) for row in weights}
    for _ in range(2):
        centres = {
            c: [
                sum(w[c] * v for w, v in zip(weights, column, strict=True))
                for column in zip(*points, strict=True)
            ]
            for c in there
        }
        labels = [max(sorted(there), key=lambda c: cosine(p, centres[c])) for p in points]
        weights = [[float(c == y) for c in range(probs.shape[1])] for y in labels]
        there = set(labels)
    return labels


def slow_distances(rows, labels):
    """Lists of half of one minus the cosine, for pairs within and between classes."""
    within, between = [rows.sum() * 0], [rows.sum() * 0]
    for i in range(len(rows)):
        for j in range(i, len(rows)):
            a, b = rows[i], rows[j]
            distance = 0.5 * (1 - (a * b).sum() / (a.norm() * b.norm()))
            (within if labels[i] == labels[j] else between).append(distance)
    return (sum(d) / max(len(d) - 1, 1) for d in (within, between))


def slow_loss(logits, rows, ce_weight, secondary_weight, intra_weight, inter_weight):
    probs = logits.exp() / logits.exp().sum(1, keepdim=True)
    primary = slow_labels(rows.detach(), probs.detach())
    first = second = entropy = weighted = 0
    for p, label in zip(probs, primary, strict=True):
        values = p.tolist()
        runner_up = values.index(sorted(values)[-2])
        ratio = min(values[runner_up] / values[label], 1)
        own = -(p * p.log()).sum()
        first, second = first - p[label].log(), second - ratio * p[runner_up].log()
        entropy, weighted = entropy + own, weighted + ratio * own
    n, mean = len(probs), probs.mean(0)
    diversity = -(mean * mean.log()).sum()
    within, between = slow_distances(rows, primary)
    loss = ce_weight * first / n + entropy / n - diversity
    loss = loss + secondary_weight * (ce_weight * second / n + weighted / n - diversity)
    return loss + intra_weight * within - inter_weight * between


def run_by_hand(net, batches, optim, lr, weights):
    slow.batch_norms_in_training(net)
    parameters = [p for n, p in net.named_parameters() if not n.startswith(("fc.", "head."))]
    head = net.fc if hasattr(net, "fc") else net.head
    optimizer, outputs = HAND[optim](parameters, lr), []
    for x in batches:
        rows = features(net, x)
        logits = head(rows)
        optimizer.step(torch.autograd.grad(slow_loss(logits, rows, **weights), parameters))
        outputs.append(logits.detach())
    return outputs


@pytest.mark.parametrize(
    ("name", "optim", "weights"),
    [("resnet_bn", "sgd", WEIGHTS), ("vit", "adam", OTHER_WEIGHTS)],
)
def test_against_loops(name, optim, weights):
    lr = {"adam": 2e-3, "sgd": 5e-3}[optim]
    batches = [x.double() for x in make_batches(name, SIZES)]
    net, by_hand = make_net(name).double(), make_net(name).double()
    live = ISFDA(net, lr=lr, optim=optim, **weights)
    logits = torch.cat([live(x) for x in batches])
    expected = torch.cat(run_by_hand(by_hand, batches, optim, lr, weights))
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    for path, wanted in by_hand.named_parameters():
        got = live.model.get_parameter(path)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
        assert torch.equal(got, net.get_parameter(path)) == path.startswith(("fc.", "head."))


def test_labels_and_distances_of_random_points():
    g = torch.Generator().manual_seed(0)
    for size in (1, 2, 7, 12, 20):
        rows = torch.randn(size, 3, generator=g).double()
        probs = (2 * torch.randn(size, 4, generator=g).double()).softmax(1)
        labels = prototype_labels(rows, probs)
        assert labels.tolist() == slow_labels(rows, probs)
        got, wanted = class_distances(rows, labels), tuple(slow_distances(rows, labels.tolist()))
        torch.testing.assert_close(got, wanted)


def test_a_class_that_loses_its_samples_has_no_centre():
    """Nobody is nearest to class 1; a zero vector as its centre would win the fourth sample."""
    rows = torch.tensor([[2.0, 2.0], [3.0, 5.0], [-2.0, 1.0], [2.0, -2.0], [-3.0, 1.0]])
    probs = [[0.27, 0.58, 0.15], [0.48, 0.25, 0.27], [0.22, 0.34, 0.44]]
    probs = torch.tensor([*probs, [0.31, 0.13, 0.56], [0.35, 0.29, 0.36]])
    assert prototype_labels(rows, probs).tolist() == [0, 0, 2, 0, 2] == slow_labels(rows, probs)


def test_one_class_and_zero_features_stay_finite():
    rows = torch.zeros(4, 3, requires_grad=True)
    within, between = class_distances(rows, torch.zeros(4, dtype=torch.long))
    (within - between).backward()
    assert between == 0
    assert rows.grad.isfinite().all()
    (x,) = make_batches("resnet_bn", (1,))
    live = ISFDA(make_net("resnet_bn"))
    for batch in (x, x, x.repeat(4, 1, 1, 1)):
        assert live(batch).isfinite().all()
    assert all(p.isfinite().all() for p in live.model.parameters())


def test_a_sure_model_has_no_zero_over_zero():
    net = make_net("mlp")
    with torch.no_grad():
        net.head.weight.mul_(1000)
    live = ISFDA(net)
    for x in make_batches("mlp"):
        assert live(x).isfinite().all()


def test_frozen_modules_head_and_adapter_stay():
    net = make_net("resnet_bn")
    adapted = attach(net, make_adapter(net))
    live = ISFDA(adapted, freeze=["layer1", "conv1"], lr=0.01)
    for x in make_batches("resnet_bn"):
        live(x)
    for path, parameter in live.model.named_parameters():
        stays = path.startswith(("layer1.", "conv1.", "fc."))
        assert torch.equal(parameter, adapted.get_parameter(path)) == stays, path
        assert parameter.requires_grad != stays, path
    live.reset()
    assert not live.optimizer.state


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ce_weight": -1}, "ce_weight of isfda, must be at least 0 and finite, got -1"),
        ({"inter_weight": float("nan")}, "inter_weight of isfda, must be at least 0 and finite"),
        ({"freeze": ["layer5"]}, "has no module 'layer5'. Did you mean 'layer"),
        ({"freeze": [""]}, "has no module ''"),
        ({"lr": 0}, "lr of the optimiser, must be above 0"),
        ({"optim": "lbfgs"}, "optim of a method, must be one of 'adam', 'sgd'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        ISFDA(make_net("resnet_bn"), **settings)


def test_nothing_to_train():
    with pytest.raises(ModelError, match=r"must be at least one.*got all of them frozen"):
        ISFDA(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)))
