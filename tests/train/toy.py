"""A data set and a backbone for tests: small, quick to learn, noisy enough to stay uncertain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from twoshift.data.base import ImageSet, LazyImages, datasets
from twoshift.models.base import Normalize, models
from twoshift.train.recipes import AdapterRecipe, SourceRecipe

DATA, FILES, NET = "toy", "toy_files", "toy_net"
SIDE, CLASSES, PER_CLASS = 12, 4, 120
COUNTS = [120, 55, 25, 12]  # of the long-tailed subset at ratio 10


def toy(split: str, root: Path) -> ImageSet:
    """Four textures under noise; crops and mirror images leave them what they are."""
    return textures(split, SIDE)


def textures(split: str, side: int) -> ImageSet:
    rng = np.random.default_rng(0 if split == "train" else 1)
    labels = rng.permutation(np.repeat(np.arange(CLASSES), PER_CLASS))
    row, column = np.indices((side, side))
    shapes = [row // 2 % 2, column // 2 % 2, (row // 2 + column // 2) % 2, (row + column) % 2]
    clean = np.stack([100 + 50 * t for t in shapes])[labels][..., None] + np.array([0, 10, -10])
    noisy = clean + rng.normal(0, 85, (len(labels), side, side, 3))
    images = noisy.clip(0, 255).astype(np.uint8)
    return ImageSet(DATA, split, images, labels, tuple("abcd"), origin="synthetic")


class Framed(LazyImages):
    """Images cut out of larger ones when asked for; knows how many were asked for at once."""

    def __init__(self, frames, size, asked=None):
        self.frames, self.size = frames, size
        self.asked = [] if asked is None else asked

    @property
    def shape(self):
        return (len(self.frames), self.size, self.size, self.frames.shape[-1])

    def __getitem__(self, rows):
        edge = (self.frames.shape[1] - self.size) // 2
        return self.framed(rows)[:, edge : edge + self.size, edge : edge + self.size]

    def framed(self, rows):
        chosen = self.frames[rows]
        self.asked.append(len(chosen))
        return chosen

    def subset(self, rows):
        return Framed(self.frames[rows], self.size, self.asked)


def toy_files(split: str, root: Path, *, size: int = 12, frame: int = 16, squash: bool = True):
    """The textures as if they were in files, and not as many of every class."""
    full = textures(split, frame)
    kept = np.flatnonzero(np.arange(len(full)) % 7 >= full.labels)
    found = replace(full, name=FILES, images=Framed(full.images, size))
    return found.subset(kept)


class ToyNet(nn.Module):
    """Two convolutions and a linear head.

    Not a slim resnet18_cifar: oneDNN's gradient of a strided 1x1 convolution with fewer input
    channels than a vector register holds writes out of bounds when images are channels last.
    """

    def __init__(self, classes=4, channels=3, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2), norm="bn"):
        super().__init__()
        layer = {"bn": nn.BatchNorm2d, "gn": lambda c: nn.GroupNorm(4, c)}[norm]
        self.normalize = Normalize(mean, std, channels)
        self.body = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1, bias=False),
            layer(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=False),
            layer(16),
            nn.ReLU(),
        )
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        return self.fc(torch.flatten(self.body(self.normalize(x)).mean((2, 3)), 1))


def register() -> None:
    datasets.register(DATA)(toy)
    datasets.register(FILES)(toy_files)
    models.register(NET)(ToyNet)


def unregister() -> None:
    del datasets._entries[DATA], datasets._entries[FILES], models._entries[NET]


def source_recipe(**changes) -> SourceRecipe:
    settings = {
        "dataset": DATA,
        "ratio": 10,
        "architecture": NET,
        "epochs": 3,
        "batch_size": 16,
        "lr": 0.05,
        "retrain_epochs": 2,
    }
    return SourceRecipe(**{**settings, **changes})


def adapter_recipe(**changes) -> AdapterRecipe:
    settings = {"epochs": 3, "batch_size": 32, "lr": 0.05, "augment": "none"}
    return AdapterRecipe(**{**settings, **changes})
