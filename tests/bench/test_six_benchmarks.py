"""The six benchmarks of the paper, each on a small tree with the true layout.

From the source training through the adapter to an adapted stream, with every method of the paper:
the very cells of the paper's table, made small in nothing but the network, the epochs, the learning
rate, the pixels, the batch and the images between two updates.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.data.trees import (
    make_domainnet_tree,
    make_imagenet_c_tree,
    make_imagenet_tree,
    make_office_home_tree,
    make_visda_tree,
)
from twoshift import models
from twoshift.bench.cell import Model
from twoshift.bench.table import load_table
from twoshift.bench.workshop import Workshop
from twoshift.data import cifar

# they have tables of their own; here they step on images of any entropy, and enough to be seen
NOT_IN_THE_TABLE = {
    "sar": {"margin": 2, "lr": 0.1},
    "delta": {},
    "isfda": {"lr": 0.1},
    "im_loss": {},
}
STEPPING = ("pseudo_label", "cotta", "tent", *NOT_IN_THE_TABLE)
ONE_STREAM = {"corruption": ["fog"], "labels": ["backward-10"]}
TINY = {"size": 32, "frame": 36}


def tiny_cifar(kind, root, monkeypatch, per_class=4):
    """Official files of a few images each, and facts that say so."""
    rng, classes, files = np.random.default_rng(0), len(kind.classes), {}
    for split, official in kind.files.items():
        count = per_class * classes
        colours = np.random.default_rng(1).integers(40, 216, (classes, 3)).repeat(1024, 1)
        for file in official:
            fine = np.arange(count) % classes
            pixels = (colours[fine] + rng.normal(0, 25, (count, 3072))).clip(0, 255)
            labels = [fine] if len(kind.label_keys) == 1 else [fine % 20, fine]
            rows = np.column_stack([*labels, pixels]).astype(np.uint8)
            (root / kind.binary).mkdir(parents=True, exist_ok=True)
            (root / kind.binary / f"{file.stem}.bin").write_bytes(rows.tobytes())
            md5 = hashlib.md5(rows.tobytes()).hexdigest()
            files.setdefault(split, []).append(cifar.File(file.stem, count, md5))
    facts = replace(kind, files={split: tuple(found) for split, found in files.items()})
    monkeypatch.setattr(cifar, kind.name.upper(), facts)


def torchvision_weights(root, architecture):
    """What a user would download, for a narrow network: a state dict with 1000 classes."""
    (root / "weights").mkdir()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = models.create(architecture, classes=1000, width=8).state_dict()
    torch.save(state, root / "weights" / f"{architecture}.pth")


def make_tree(name, root, monkeypatch):
    if name.startswith("table1"):
        tiny_cifar(getattr(cifar, name.partition("-")[2].upper()), root, monkeypatch)
    elif name == "table2-imagenet":
        make_imagenet_tree(root)
        make_imagenet_c_tree(root, {"fog": "weather"})
    else:
        make, architecture = {
            "table3-visda": (make_visda_tree, "resnet101"),
            "table4-officehome": (make_office_home_tree, "resnet50"),
            "table5-domainnet": (make_domainnet_tree, "resnet50"),
        }[name]
        make(root)
        torchvision_weights(root, architecture)


def made_small(cell):
    source, adapter = {**cell.model.source}, cell.model.adapter
    width = 16 if source["architecture"] == "resnext50_32x4d" else 8  # 32 groups need as many
    source |= {"epochs": 1, "batch_size": 16, "lr": 0.01}  # so few images bear no more
    source |= {"settings": {**source["settings"], "width": width}}
    if "decoding" in source:
        source["decoding"] = {**source["decoding"], **TINY}
    if source.get("milestones"):
        source["milestones"] = [1]
    if source["ratio"] > 1:
        source["ratio"] = 2
    small = adapter and {**adapter, "epochs": 1, "batch_size": 16, "views": 1}
    batch = 26 if source["dataset"] == "cifar100" else 3  # some batches: what was learnt must show
    paced = {"update_every": batch} if cell.method in ("onda", "note") else {}
    settings = {**cell.settings, **paced}
    return replace(cell, model=Model(source, small), batch_size=batch, settings=settings)


def cells_of(name):
    table = load_table(name)
    profile = table.profiles[-1]  # the paper's
    only = {"column": [table.columns[0]]} if table.by == "domains" else ONE_STREAM
    found = table.cells(profile, seeds=1, only=only)
    plain, iabn = (
        next(c for c in found if c.method == method and c.adapter is None)
        for method in ("tent", "iabn")
    )
    others = [replace(plain, method=name, settings=s) for name, s in NOT_IN_THE_TABLE.items()]
    others.append(replace(iabn, method="source", settings={}))  # what IABN starts from
    return [made_small(cell) for cell in (*found, *others)]


@pytest.mark.parametrize(
    "name",
    [
        "table1-cifar10",
        "table1-cifar100",
        "table2-imagenet",
        pytest.param("table3-visda", marks=pytest.mark.slow),  # a ResNet-101
        "table4-officehome",
        "table5-domainnet",
    ],
)
def test_from_training_to_an_adapted_stream(name, tmp_path, monkeypatch):
    make_tree(name, tmp_path / "data", monkeypatch)
    works = Workshop(tmp_path / "models", tmp_path / "data")
    seen = {}
    for cell in cells_of(name):
        result = works.run(cell)
        metrics = result.metrics
        assert 0 <= metrics["accuracy"] <= 1
        assert np.isfinite(metrics["nll"])
        assert metrics["images"] > 0
        assert metrics["batches"] > 1
        norm = cell.model.source["settings"]["norm"]
        seen.setdefault((cell.method, norm, cell.adapter, cell.estimator), result)
    assert len({result.metrics["images"] for result in seen.values()}) == 1  # one stream
    pixels = seen["source", "bn", None, "ema"].facts["pixels"]
    assert ("ImageNet-C" in pixels) == (name == "table2-imagenet")

    def differ(one, other):
        first, second = (seen[row].metrics["nll"] for row in (one, other))
        return first != pytest.approx(second, rel=1e-6)

    source, statistics = ((method, "bn", None, "ema") for method in ("source", "bn_stats"))
    for method in ("bn_stats", "onda", "lame", *STEPPING):
        assert differ((method, "bn", None, "ema"), source), method
    assert differ(("tent", "bn", "logit", "oracle"), ("tent", "bn", None, "ema"))
    for method in STEPPING:
        assert differ((method, "bn", None, "ema"), statistics), method
    for method in ("iabn", "note"):
        assert differ((method, "iabn", None, "ema"), ("source", "iabn", None, "ema")), method
    for row in (("tent", "bn"), ("iabn", "iabn")):
        for estimator in ("ema", "oracle"):
            assert differ((*row, "trained", estimator), (*row, "identity", "ema")), row
