"""Two long-tailed Gaussians in the plane: how tau moves the decision boundary of a network.

A small network is trained once per tau with the generalised logit-adjusted loss. In addition, the
network of tau = 1 is frozen and gets an adapter. Given a label distribution, the adapter moves the
boundary to that of the network trained with the tau of this distribution. For Gaussians the best
boundary is known, see `bayes_boundary`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from twoshift.adapters import LabelShiftAdapter, attach, condition, shifted_logits
from twoshift.models.head import features
from twoshift.priors import Prior, from_counts
from twoshift.train.adapter import adjusted_loss, between

COUNTS = (2000, 200)  # head and tail
DISTANCE = 1.25  # of both means from the origin, in standard deviations
HIDDEN = 16
POSITIONS = {"source": 1, "uniform": 0, "reversed": -1}
Classifier = Callable[[Tensor], Tensor]


class Plane(NamedTuple):
    """Points and their labels: 0 is the head class, on the left."""

    x: Tensor
    y: Tensor
    prior: Prior


class Boundaries(NamedTuple):
    """The trained classifiers: one for every tau, and one for every label distribution."""

    plane: Plane
    by_tau: dict[float, Classifier]
    by_prior: dict[str, Classifier]


class BoundaryMap(NamedTuple):
    """What a drawing of the boundaries shows, as plain numbers.

    Attributes:
        axis: Coordinates of a square grid, along both axes.
        clouds: Some points of the head and of the tail class, (N, 2) each.
        panels: Margins on the grid, by panel and line: 0 is the boundary.
        best: Where the best boundary crosses the first axis, for the lines of a panel.
    """

    axis: NDArray[np.float64]
    clouds: dict[str, NDArray[np.float32]]
    panels: dict[str, dict[str, NDArray[np.float64]]]
    best: list[float]


def plane(seed: int = 0, counts: Sequence[int] = COUNTS) -> Plane:
    """Draw the points."""
    rng = np.random.default_rng(seed)
    y = np.repeat([0, 1], counts)
    x = rng.normal(size=(len(y), 2)) + np.outer(2 * y - 1, [DISTANCE, 0])
    return Plane(torch.tensor(x, dtype=torch.float32), torch.tensor(y), from_counts(list(counts)))


def bayes_boundary(tau: float, prior: Prior) -> float:
    """Where the best boundary for pi_s ** (1 - tau) crosses the first axis; it is vertical."""
    return (1 - tau) * math.log(prior[0] / prior[1]) / (2 * DISTANCE)


def train_boundaries(taus: Sequence[float] = (0, 1, 2), seed: int = 0) -> Boundaries:
    """Train everything that the figure shows, in seconds.

    Args:
        taus: The taus of source, uniform and reversed labels.
        seed: Seed of points and initialisation; the same seed trains the same networks.
    """
    points = plane(seed)
    networks = {tau: train_network(points, tau, seed) for tau in taus}
    adapter = train_adapter_on(networks[taus[1]], points, [1 - tau for tau in taus], seed)
    by_prior: dict[str, Classifier] = {}
    for name, position in POSITIONS.items():
        network = attach(networks[taus[1]], adapter)
        condition(network, between(position, points.prior, adapter.lambdas)[0])
        by_prior[name] = network
    return Boundaries(points, {**networks}, by_prior)


def boundary_map(trained: Boundaries, points: int = 600) -> BoundaryMap:
    """Compute what a drawing of the boundaries shows.

    Args:
        trained: The classifiers.
        points: Points of the head class to show; of the tail class as many as its share.
    """
    axis, prior = np.linspace(-3.6, 3.6, 181), trained.plane.prior
    x, y = trained.plane.x.numpy(), trained.plane.y.numpy()
    clouds = {"head": x[y == 0][:points], "tail": x[y == 1][: max(1, round(points * prior[1]))]}
    by_tau = {f"tau = {tau:g}": margin(c, axis) for tau, c in trained.by_tau.items()}
    by_prior = {f"{name} labels": margin(c, axis) for name, c in trained.by_prior.items()}
    panels = {
        "one network trained per tau": by_tau,
        "one network and its adapter, told the labels": by_prior,
    }
    return BoundaryMap(axis, clouds, panels, [bayes_boundary(t, prior) for t in trained.by_tau])


def train_network(points: Plane, tau: float, seed: int = 0, steps: int = 150) -> nn.Sequential:
    """A small network, trained with CE(logits + tau log pi_s, y)."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = nn.Sequential(
            nn.Linear(2, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, 2),
        )
    shift = tau * torch.tensor(points.prior, dtype=torch.float32).log()
    _minimise(network, lambda step: adjusted_loss(network(points.x), points.y, shift), steps)
    return network.eval().requires_grad_(False)


def train_adapter_on(
    network: nn.Sequential, points: Plane, lambdas: Sequence[float], seed: int = 0, steps: int = 300
) -> LabelShiftAdapter:
    """The label shift adapter of a frozen network, as in `twoshift.train.adapter`."""
    h, head = features(network, points.x).detach(), network[-1]
    assert isinstance(head, nn.Linear)
    log_prior = torch.tensor(points.prior, dtype=torch.float32).log()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapter = LabelShiftAdapter(HIDDEN, 2, class_counts=COUNTS, lambdas=lambdas)

    def loss(step: int) -> Tensor:
        position = list(POSITIONS.values())[step % len(POSITIONS)]
        prior, lambda_ = between(position, points.prior, adapter.lambdas)
        shift = adapter(torch.tensor(prior, dtype=torch.float32))
        logits = shifted_logits(h, head.weight, head.bias, shift)
        return adjusted_loss(logits, points.y, (1 - lambda_) * log_prior)

    _minimise(adapter, loss, steps)
    return adapter.eval()


def _minimise(module: nn.Module, loss: Callable[[int], Tensor], steps: int) -> None:
    # weight decay keeps the boundary straight where points are few
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.02, weight_decay=0.1)
    for step in range(steps):
        optimiser.zero_grad()
        loss(step).backward()
        optimiser.step()


@torch.no_grad()
def margin(classifier: Classifier, axis: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logit of the tail minus that of the head on a square grid; 0 is the boundary.

    Args:
        classifier: Maps points to two logits each.
        axis: Coordinates along both axes; rows of the result follow the second axis.
    """
    across, up = np.meshgrid(axis, axis)
    points = torch.tensor(np.stack([across.ravel(), up.ravel()], 1), dtype=torch.float32)
    logits = classifier(points)
    return (logits[:, 1] - logits[:, 0]).reshape(across.shape).double().numpy()


def crossing(classifier: Classifier, height: float = 0.0) -> float:
    """The first coordinate at which the boundary crosses the line at ``height``."""
    axis = np.linspace(-4, 4, 801)
    line = torch.tensor(np.stack([axis, np.full_like(axis, height)], 1), dtype=torch.float32)
    with torch.no_grad():
        logits = classifier(line)
    return float(axis[int((logits[:, 1] - logits[:, 0]).abs().argmin())])
