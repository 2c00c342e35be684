from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.toys import make_moments, make_net
from twoshift.errors import PriorError, SettingError
from twoshift.methods import Source
from twoshift.methods._appearance import Appearances, appearance, checked_appearance
from twoshift.models.norm import batch_norms
from twoshift.watch import by_chance, label_distance
from twoshift.watch.distances import BEYOND, FAR, KnownImages, LayerDistances


def test_the_distance_of_labels_is_the_share_that_must_move():
    assert label_distance([0.5, 0.5, 0], [0.5, 0.5, 0]) == 0
    assert label_distance([1, 0], [0, 1]) == 1
    assert label_distance([0.5, 0.3, 0.2], [0.4, 0.4, 0.2]) == pytest.approx(0.1)


@pytest.mark.parametrize("images", [1, 7, 40])
@pytest.mark.parametrize("labels", [[0.5, 0.5], [0.7, 0.2, 0.1, 0.0], [1.0]])
def test_the_mean_distance_by_chance_is_that_of_every_outcome(labels, images):
    """The mean absolute deviation of a binomial number, term by term."""
    mean = 0.0
    for p in labels:
        outcomes = range(images + 1)
        chances = [math.comb(images, k) * p**k * (1 - p) ** (images - k) for k in outcomes]
        mean += sum(c * abs(k / images - p) for c, k in zip(chances, outcomes, strict=True)) / 2
    slack = math.sqrt(math.log(20) / (2 * images))
    assert by_chance(labels, images) == pytest.approx(min(1, mean + slack))


def test_sampling_hardly_ever_exceeds_what_chance_allows():
    rng, labels = np.random.default_rng(0), np.array([0.4, 0.3, 0.2, 0.1])
    counts = rng.multinomial(100, labels, size=2000)
    far = [label_distance(row / 100, labels) > by_chance(labels, 100) for row in counts]
    assert np.mean(far) <= 0.05


def test_wrong_labels_are_refused():
    with pytest.raises(PriorError):
        by_chance([0.5, 0.6], 10)


def test_what_images_look_like_together():
    x = torch.rand(20, 3, 8, 8) * torch.rand(20, 1, 1, 1)
    looks = Appearances()
    looks.add(x[:7])
    looks.add(x[7:])
    seen = appearance(x)
    expected = [seen.min(0), seen.max(0), seen.mean(0), seen.var(0)]
    assert np.allclose(looks.read(), expected)
    assert checked_appearance([list(row) for row in looks.read()]) == looks.read()
    with pytest.raises(SettingError, match="four rows of 3"):
        checked_appearance([[0.0] * 3] * 4)


def test_images_outside_of_all_that_was_seen():
    rows = [[0.2, -2.0, -4.0], [0.8, -1.0, -2.0], [0.5, -1.5, -3.0], [0.01, 0.04, 0.09]]
    known = KnownImages(tuple(map(tuple, rows)))
    inside, reach = [0.5, -1.5, -3.0], BEYOND * np.sqrt(rows[3])
    seen = np.array([inside, inside, [0.0 - 0.01, -1.5, -3.0], inside])
    seen[1] = np.array(rows[0]) - 0.99 * reach  # less than seen, but not far
    seen[3, 2] = rows[1][2] + 1.01 * reach[2]
    assert known.outside(seen).tolist() == [False, False, True, True]
    assert known.distance(np.array([inside])) == 0
    one = np.array([[0.5 + 0.1, -1.5, -3.0]])  # one standard deviation in one of three numbers
    assert known.distance(one) == pytest.approx(1 / 3)


def test_distances_of_layers_are_those_of_their_statistics():
    """Layer by layer, written out, on a network with skips."""
    net = make_net("resnet_bn")
    moments = {n: torch.tensor(m) for n, m in make_moments(net).items()}
    classes = next(iter(moments.values())).shape[1]
    watched = Source(net).model
    layers = LayerDistances(watched, moments, classes)
    x, labels = torch.rand(6, 3, 16, 16), np.arange(1, classes + 1) / sum(range(classes + 1))
    inputs = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, i, name=name: inputs.update({name: i[0]}))
        for name, layer in batch_norms(watched)
    ]
    with layers.looking():
        watched(x)
    found = layers.read(labels)
    assert list(found) == [name for name, _ in batch_norms(watched)]
    for name, layer in batch_norms(watched):
        mean, var = (m.double().numpy() for m in moments[name])
        expected = labels @ mean
        wide = labels @ (var + mean**2) - expected**2 + layer.eps
        values = inputs[name].double().movedim(1, 0).flatten(1).numpy()
        away = (values.mean(1) - expected) ** 2 / wide
        each = away + np.log((values.var(1) + layer.eps) / wide) ** 2
        assert found[name] == pytest.approx(each.mean(), rel=1e-4)
    assert layers.read(labels) == {}  # until the next pass
    assert layers.far > 0
    for hook in hooks:
        hook.remove()


def test_far_is_many_times_what_labels_can_do():
    net = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)).eval()
    moments = {"0": torch.tensor([[[-1.0], [1.0]], [[1.0], [1.0]]])}
    layers = LayerDistances(net, moments, 2)
    mixed = 1.0 + 1.0 + 1e-5  # variance of both classes together
    one = 1.0 / mixed + math.log((1.0 + 1e-5) / mixed) ** 2
    assert layers.far == pytest.approx(FAR * one)
