"""A small classifier of coloured images with its calibration, and images to predict."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import twoshift
from twoshift.calibration import Calibration
from twoshift.predict.build import Ready, make_ready

CLASSES = ("ant", "bee", "cat")
SIDE = 8
MY_NET = """
from tests.predict.small import make_net, make_group_net
"""


def make_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, len(CLASSES)),
    )


def make_group_net() -> nn.Sequential:
    layers = [nn.GroupNorm(4, 16) if isinstance(m, nn.BatchNorm2d) else m for m in make_net()]
    return nn.Sequential(*layers)


def pixels(count: int, seed: int, dark: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Images whose colour tells the class, in noise: uint8 (N, 8, 8, 3), and labels."""
    rng = np.random.default_rng(seed)
    labels = rng.choice(3, count, p=[0.5, 0.3, 0.2])
    colours = np.array([[140, 110, 110], [110, 140, 110], [110, 110, 140]])
    noise = rng.normal(0, 60, (count, SIDE, SIDE, 3))
    return ((colours[labels][:, None, None] + noise) * dark).clip(0, 255).astype(np.uint8), labels


def as_batches(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = pixels(count, seed)
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    return list(zip(x.split(32), torch.from_numpy(labels).split(32), strict=True))


@dataclass(frozen=True)
class Known:
    """A trained network and its facts."""

    net: nn.Module
    facts: Calibration

    def ready(self, **settings: object) -> Ready:
        return make_ready(self.net, self.facts, decoding={"frame": SIDE}, **settings)


@functools.cache
def known_of(make: Callable[[], nn.Module]) -> Known:
    """Train a network, and find out its facts."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make()
        optimiser = torch.optim.Adam(net.parameters(), 1e-2)
        for x, y in as_batches(1600, 0):
            optimiser.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimiser.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        new = as_batches(320, 3)
        facts = twoshift.calibrate(net.eval(), as_batches(320, 1), held_out=new, classes=CLASSES)
    return Known(net, facts)


def write_images(folder: Path, count: int, seed: int = 2, dark: float = 0.6) -> np.ndarray:
    """Darker images in two folders, ``count`` altogether; returns their labels."""
    images, labels = pixels(count, seed, dark)
    for i, image in enumerate(images):
        path = folder / "xy"[2 * i // count] / f"{i:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return labels
