"""Real architectures of timm, with random weights: everything that a user does with a network."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import twoshift
from tests.cli.conftest import twoshift as command
from tests.data.trees import write_image
from twoshift import methods, models
from twoshift.adapters import ANSWER
from twoshift.calibration import Calibration
from twoshift.errors import ModelError, SettingError
from twoshift.methods import Method
from twoshift.models.classifier import prepare
from twoshift.models.head import find_head, trace_head
from twoshift.models.norm import batch_norms, is_plain

timm = pytest.importorskip("timm", reason="timm is tried by `make test-timm`")

__all__ = ["command"]

CLASSES = 5
COUNTS = (30, 20, 14, 9, 7)
# the kinds of batch norm that timm builds, and the head
PLAIN, WITH_ACT = "BatchNorm2d", "BatchNormAct2d"
NETS = {
    "resnet18": ({PLAIN}, "net.fc"),
    "regnety_002": ({WITH_ACT}, "net.head.fc"),
    "mobilenetv3_small_050": ({WITH_ACT}, "net.classifier"),
    "ghostnet_100": ({PLAIN, WITH_ACT}, "net.classifier"),
    "dpn48b": ({WITH_ACT}, "net.classifier"),  # a 1x1 convolution
    "tresnet_m": ({WITH_ACT}, "net.head.fc"),  # sees 4x4 pixels as 48 channels
    "convnext_femto": (set(), "net.head.fc"),
    "deit_tiny_distilled_patch16_224": (set(), None),  # the mean of two heads
}
SIDES = {"deit_tiny_distilled_patch16_224": 224}
NORMED = [name for name, (kinds, _) in NETS.items() if kinds and name != "tresnet_m"]  # large
each = pytest.mark.parametrize("name", NETS)
each_normed = pytest.mark.parametrize("name", NORMED)
quietly = pytest.mark.filterwarnings("ignore::twoshift.errors.TwoshiftWarning")  # of random weights


@cache
def network(name: str) -> models.hub.HubModel:
    """With statistics of its own, as after a training; read it, never write to it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = models.create(f"timm:{name}", classes=CLASSES)
        nn.init.normal_(find_head(net)[1].weight, std=0.5)
        with torch.no_grad():
            for layer in net.modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    layer.momentum = None  # the mean of all batches
            net.train()(images(name, 16))
    return net.eval()


def images(name: str, number: int = 6, seed: int = 1) -> torch.Tensor:
    side = SIDES.get(name, 48)
    return torch.rand(number, 3, side, side, generator=torch.Generator().manual_seed(seed))


def labelled(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(CLASSES), COUNTS))
    x = images(name, len(labels)) * 0.5 + torch.from_numpy(labels)[:, None, None, None] / 10
    return list(zip(x.split(20), torch.from_numpy(labels).split(20), strict=True))


def the_same(a: Method, b: Method, x: torch.Tensor) -> bool:
    return torch.equal(a(x), b(x))


@each
def test_it_is_built_and_prepared_without_changing_a_bit(name):
    net, x = network(name), images(name)
    kinds, head = NETS[name]
    assert {type(layer).__name__ for _, layer in batch_norms(net)} == kinds
    own = timm.create_model(name, num_classes=CLASSES).eval()
    own.load_state_dict(net.net.state_dict())
    cfg = own.pretrained_cfg
    mean, std = (torch.tensor(cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        expected = own((x - mean) / std)
        ready = prepare(net)
        assert torch.equal(ready(x), net(x))
    torch.testing.assert_close(net(x), expected)
    assert torch.equal(methods.create("source", net)(x), net(x))
    assert all(is_plain(layer) for _, layer in batch_norms(ready))
    assert ready.state_dict().keys() == net.state_dict().keys()
    assert trace_head(net, x) == head


METHODS = {
    "tent": {"lr": 1e-3},
    "iabn": {},
    "onda": {"update_every": 4},
    "rotta": {"capacity": 6, "update_every": 4},
    "delta": {"lr": 1e-3},
}


@pytest.mark.parametrize("method", METHODS)
@each_normed
def test_methods_move_and_continue_from_a_saved_state(name, method, tmp_path):
    net, x = network(name), images(name) * 0.5
    if method == "iabn":
        net = models.create(f"timm:{name}", classes=CLASSES, norm="iabn")
        net.load_state_dict(network(name).state_dict())
    live = methods.create(method, net, **METHODS[method])
    first = live(x)
    assert first.shape == (len(x), CLASSES)
    assert first.isfinite().all()
    live.save(tmp_path / "state")
    again = Method.load(tmp_path / "state", net)
    assert the_same(live, again, x.flip(0))
    assert not torch.equal(live(x), first)
    live.reset()
    assert torch.equal(live(x), first)


@quietly
@each
def test_calibrated_and_recommended(name, tmp_path):
    net = network(name)
    facts = twoshift.calibrate(net, labelled(name), held_out=labelled(name))
    facts.save(tmp_path / "facts")
    live = twoshift.recommended(net, tmp_path / "facts")
    kinds, head = NETS[name]
    assert facts.classifier.head == (head or ANSWER)
    x = images(name)
    if kinds:
        assert "Matched" in live.describe()
        assert facts.facts["moments"].keys() == dict(batch_norms(net)).keys()
        assert live(x).isfinite().all()
    else:
        assert "no batch normalisation" in live.describe()
        assert torch.equal(live(x), net(x))
    assert live.prior.sum() == pytest.approx(1, abs=1e-4)
    live.save(tmp_path / "state")
    assert the_same(live, twoshift.LabelAware.load(tmp_path / "state", net), x)


@quietly
def test_from_the_command_line(command, tmp_path):
    net = network("regnety_002")
    torch.save(net.net.state_dict(), tmp_path / "timms.pth")  # as a training with timm saves it
    torch.save(net.state_dict(), tmp_path / "ours.pth")
    for label, count in enumerate(COUNTS):
        for i in range(count):
            write_image(tmp_path / "photos" / f"class{label}" / f"{i}.png", label, i)
    what = ["--model", "timm:regnety_002", "--data", f"folder:{tmp_path / 'photos'}", "--size", 32]
    for weights in ("timms.pth", "ours.pth"):
        out = tmp_path / f"facts of {weights}"
        code, printed, err = command(
            "calibrate", *what, "--weights", tmp_path / weights, "--out", out
        )
        assert code == 0, err
        assert printed.startswith(f"facts in {out}\n")
        assert "head     net.head.fc" in printed
        facts = Calibration.load(out)
        assert facts.classifier.classes == tuple(f"class{i}" for i in range(CLASSES))
        x = images("regnety_002")[..., :32, :32]
        assert twoshift.recommended(net, out)(x).shape == (6, CLASSES)


def test_names_and_settings_that_timm_refuses():
    with pytest.raises(ModelError, match=r"timm cannot build 'resnet19'.*list_models"):
        models.create("timm:resnet19", classes=CLASSES)
    with pytest.raises(SettingError, match="no batch norm"):
        models.create("timm:convnext_femto", classes=CLASSES, norm="iabn")
