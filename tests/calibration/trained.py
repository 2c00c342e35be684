"""Two small classifiers of one's own, trained in seconds on long-tailed digits."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.data import load
from twoshift.data.base import ImageSet
from twoshift.data.long_tail import long_tailed_indices
from twoshift.data.stream import to_float

RATIO, EPOCHS = 20, 28


@dataclass(frozen=True)
class Trained:
    """A network, the images it was trained on, and images that it has not seen, as long-tailed."""

    net: nn.Module
    train: ImageSet
    held_out: ImageSet


def make_net(classes: int = 10) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def batches(images: ImageSet, size: int = 64, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Shuffled pairs of images and labels."""
    order = np.random.default_rng(seed).permutation(len(images))
    parts = [order[i : i + size] for i in range(0, len(order), size)]
    return [(to_float(images.images[p]), torch.from_numpy(images.labels[p])) for p in parts]


def noisy(split: str, seed: int) -> ImageSet:
    """Digits in noise, so that nobody is always right."""
    digits = load("mnist5k", split)
    noise = np.random.default_rng(seed).normal(0, 120, digits.images.shape)
    return replace(digits, images=np.clip(digits.images + noise, 0, 255).astype(np.uint8))


@functools.cache
def trained(loss: str) -> Trained:
    """A network trained by ``"cross_entropy"`` or ``"balanced_softmax"``."""
    parts = [noisy("train", seed=0), noisy("test", seed=1)]
    train, held_out = (p.subset(long_tailed_indices(p.labels, RATIO)) for p in parts)
    log_prior = torch.from_numpy(train.counts / len(train)).float().log()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make_net()
        optimiser = torch.optim.Adam(net.parameters(), 5e-3)
        for epoch in range(EPOCHS):
            for x, y in batches(train, 32, seed=epoch):
                logits = net(x) + (log_prior if loss == "balanced_softmax" else 0)
                optimiser.zero_grad()
                F.cross_entropy(logits, y).backward()
                optimiser.step()
    return Trained(net.eval(), train, held_out)
