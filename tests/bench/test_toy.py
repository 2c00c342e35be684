from __future__ import annotations

import numpy as np
import pytest
import torch

from twoshift.bench.toy import (
    COUNTS,
    DISTANCE,
    bayes_boundary,
    crossing,
    margin,
    plane,
    train_boundaries,
    train_network,
)

HEIGHTS = (-1.0, -0.5, 0.0, 0.5, 1.0)


@pytest.fixture(scope="module")
def trained():
    return train_boundaries()


def place(classifier) -> float:
    return float(np.mean([crossing(classifier, height) for height in HEIGHTS]))


def test_points_are_long_tailed_and_drawn_by_the_seed():
    points = plane(seed=3)
    assert torch.bincount(points.y).tolist() == list(COUNTS)
    head, tail = (points.x[points.y == c].mean(0) for c in (0, 1))
    assert head.tolist() == pytest.approx([-DISTANCE, 0], abs=0.15)
    assert tail.tolist() == pytest.approx([DISTANCE, 0], abs=0.25)
    assert torch.equal(points.x, plane(seed=3).x)
    assert not torch.equal(points.x, plane(seed=4).x)


def test_the_best_boundary_is_where_both_densities_weigh_the_same():
    prior = np.array([0.9, 0.1])
    for tau in (0, 0.5, 1, 2):
        x = bayes_boundary(tau, prior)
        weights = prior ** (1 - tau) * np.exp(-0.5 * (x - np.array([-DISTANCE, DISTANCE])) ** 2)
        assert weights[0] == pytest.approx(weights[1])


def test_a_larger_tau_leaves_more_room_to_the_tail(trained):
    places = [place(trained.by_tau[tau]) for tau in (0, 1, 2)]
    assert places[0] > places[1] + 0.4 > places[2] + 0.8  # the tail is on the right
    best = [bayes_boundary(tau, trained.plane.prior) for tau in (0, 1, 2)]
    assert places == pytest.approx(best, abs=0.3)


def test_the_adapter_makes_the_same_movement(trained):
    told = [place(trained.by_prior[name]) for name in ("source", "uniform", "reversed")]
    assert told == pytest.approx([place(c) for c in trained.by_tau.values()], abs=0.2)


def test_training_repeats():
    points = plane()
    first, second = (train_network(points, 1, steps=5).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_margin_is_a_map_of_the_plane():
    def classifier(x):  # the tail wins where 2 * across + up > 0
        return torch.stack([torch.zeros(len(x)), 2 * x[:, 0] + x[:, 1]], 1)

    found = margin(classifier, np.array([-1.0, 0.0, 1.0]))
    assert found.tolist() == [[-3, -1, 1], [-2, 0, 2], [-1, 1, 3]]
    assert crossing(classifier, height=1.0) == pytest.approx(-0.5)
