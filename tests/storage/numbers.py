"""A number that is saved in several files: what is torn or left behind shows."""

from __future__ import annotations

import torch

from twoshift import storage


def save(folder, number=1, parts=("one", "two")):
    """A number, in the card and in every file."""
    tensors = {name: {"n": torch.full((100,), number), "c": torch.zeros(9)} for name in parts}
    storage.save_folder(folder, "toy", {"number": number}, tensors)


def load(folder):
    found = storage.read_folder(folder, "toy")
    for tensors in found.tensors.values():
        assert tensors["n"].unique().tolist() == [found.card["number"]]
    return found.card["number"]


def own(folder):
    """What a saved folder consists of."""
    return sorted(["card.json", *(path.name for path in storage.saved_files(folder).values())])
