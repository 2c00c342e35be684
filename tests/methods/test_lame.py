"""LAME against loops over samples, neighbours and classes, with its stopping rule."""

import math

import pytest
import torch

from tests.toys import make_adapter, make_batches, make_net, same
from twoshift.adapters import attach
from twoshift.errors import SettingError
from twoshift.methods.lame import LAME, affinities, agree
from twoshift.models.head import features, find_head

SIZES = (8, 5, 8, 3, 12, 1, 6, 8, 2, 16)
AFFINITIES = ("knn", "rbf", "linear")


def slow_affinities(rows, kind, k):
    points = [[v / math.hypot(*row) for v in row] for row in rows.tolist()]
    n = range(len(points))
    if kind == "linear":
        return [
            [sum(a * b for a, b in zip(points[i], points[j], strict=True)) for j in n] for i in n
        ]
    distance = [[math.dist(points[i], points[j]) for j in n] for i in n]
    if kind == "rbf":
        width = sum(sorted(row)[min(k, len(row)) - 1] for row in distance) / len(distance)
        return [[math.exp(-(d**2) / (2 * width**2)) for d in row] for row in distance]
    weights = [[0.0 for _ in n] for _ in n]
    for i in n:
        others = sorted((j for j in n if j != i), key=lambda j: distance[i][j])
        for j in others[:k]:
            weights[i][j] = 1.0
    return weights


def slow_agree(logits, weights, max_steps=100):
    """Probabilities, and how many updates it took."""
    p = [[math.exp(z) / sum(map(math.exp, row)) for z in row] for row in logits.tolist()]
    unary = [[-math.log(v + 1e-10) for v in row] for row in p]
    y, before = p, math.inf
    for i in range(max_steps):
        pairwise = [
            [sum(w * row[c] for w, row in zip(ws, y, strict=True)) for c in range(len(y[0]))]
            for ws in weights
        ]
        y, energy = [], 0.0
        for u, pull in zip(unary, pairwise, strict=True):
            e = [math.exp(b - a) for a, b in zip(u, pull, strict=True)]
            y.append([v / sum(e) for v in e])
            for a, b, v in zip(u, pull, y[-1], strict=True):
                energy += a * v - b * v + v * math.log(max(v, 1e-20))
        if i > 1 and abs(energy - before) <= 1e-8 * abs(before):
            return y, i + 1
        before = energy
    return y, max_steps


@pytest.mark.parametrize("kind", AFFINITIES)
def test_against_loops(kind):
    net = make_net("resnet_bn").double()
    live, head, counts = LAME(net, kind, k=3), find_head(net)[1], []
    before = live.state()
    for x in make_batches("resnet_bn", SIZES):
        got = live(x.double())
        with torch.no_grad():
            rows = features(net, x.double())
            logits = head(rows)
        if len(x) == 1:
            wanted = logits.softmax(1)
        else:
            probs, steps = slow_agree(logits, slow_affinities(rows, kind, 3))
            wanted = torch.tensor(probs, dtype=torch.float64)
            counts.append(steps)
        torch.testing.assert_close(got.exp(), wanted, rtol=1e-6, atol=1e-6)
    assert same(live.state(), before)
    assert len(set(counts)) > 1


@pytest.mark.parametrize("kind", AFFINITIES)
def test_it_stops_after_as_many_updates(kind):
    g = torch.Generator().manual_seed(0)
    for size in (4, 9, 15):
        rows = torch.rand(size, 3, generator=g).double()
        logits = 4 * torch.randn(size, 4, generator=g).double()
        weights = affinities(rows, kind, 3)
        _, steps = slow_agree(logits, slow_affinities(rows, kind, 3))
        assert 3 <= steps < 100
        end = agree(logits, weights, steps)
        assert torch.equal(agree(logits, weights, 100), end)
        assert not torch.equal(agree(logits, weights, steps - 1), end)


def test_max_steps():
    g = torch.Generator().manual_seed(1)
    rows, logits = torch.randn(6, 3, generator=g).double(), torch.randn(6, 4, generator=g).double()
    for steps in (1, 2, 5):
        wanted, _ = slow_agree(logits, slow_affinities(rows, "knn", 2), steps)
        got = agree(logits, affinities(rows, "knn", 2), steps).exp()
        torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64))


def test_a_sample_is_never_its_own_neighbour_even_among_duplicates():
    rows = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [-3.0, 1.0]])
    weights = affinities(rows, "knn", 2)
    assert weights.diagonal().eq(0).all()
    assert weights.sum(1).tolist() == [2, 2, 2, 2]
    assert weights[:3, 3].eq(0).all()


def test_fewer_samples_than_neighbours():
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(affinities(rows, "knn", 5), 1 - torch.eye(3))
    wanted = torch.tensor(slow_affinities(rows, "rbf", 5))
    torch.testing.assert_close(affinities(rows, "rbf", 5), wanted)


@pytest.mark.parametrize("rows", [torch.ones(4, 3), torch.zeros(4, 3), torch.eye(4)])
def test_a_width_of_zero_is_no_nan(rows):
    for k in (1, 3):
        assert affinities(rows, "rbf", k).isfinite().all()
    assert torch.equal(affinities(torch.eye(4), "rbf", 1), torch.eye(4))


@pytest.mark.parametrize("kind", AFFINITIES)
def test_sure_logits_stay_finite(kind):
    logits = torch.eye(4) * 1e4
    adjusted = agree(logits, affinities(torch.eye(4), kind, 2), 100)
    assert adjusted.isfinite().all()
    torch.testing.assert_close(adjusted.exp().sum(1), torch.ones(4))


@pytest.mark.parametrize("kind", AFFINITIES)
def test_a_batch_of_one_is_returned_as_predicted(kind):
    net = make_net("resnet_bn")
    (x,) = make_batches("resnet_bn", (1,))
    with torch.no_grad():
        expected = net(x).log_softmax(1)
    torch.testing.assert_close(LAME(net, kind)(x), expected)


def test_neighbours_outvote_a_doubtful_sample():
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, -0.1], [0.0, 1.0], [0.1, 1.0], [-0.1, 1.0]])
    logits = torch.tensor([[0.0, 0.4], [4.0, 0], [4.0, 0], [0, 4.0], [0, 4.0], [0, 4.0]])
    adjusted = agree(logits, affinities(rows, "knn", 2), 100)
    assert adjusted.argmax(1).tolist() == [0, 0, 0, 1, 1, 1]


def test_with_an_adapter_the_features_go_into_the_adapted_head():
    net = make_net("resnet_bn")
    adapted = attach(net, make_adapter(net))
    (x,) = make_batches("resnet_bn", (8,))
    with torch.no_grad():
        expected = agree(adapted(x), affinities(features(net, x), "knn", 3), 100)
    torch.testing.assert_close(LAME(adapted, k=3)(x), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"affinity": "cosine"},
            "affinity of lame, must be one of 'knn', 'rbf', 'linear', got 'cosine'",
        ),
        ({"k": 0}, "k of lame, must be a whole number from 1, got 0"),
        ({"k": 2.5}, "k of lame, must be a whole number from 1"),
        ({"max_steps": 0}, "max_steps of lame, must be a whole number"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        LAME(make_net("mlp"), **settings)
