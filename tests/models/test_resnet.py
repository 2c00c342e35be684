"""The backbone: size, names, settings, and that images are normalised inside."""

import pytest
import torch
from torch import nn

from twoshift import models
from twoshift.errors import SettingError, UnknownName
from twoshift.models.base import Normalize
from twoshift.models.norm import InstanceAwareBatchNorm
from twoshift.models.resnet import SubsampledConv


def count(net):
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(("classes", "parameters"), [(10, 11_173_962), (100, 11_220_132)])
@pytest.mark.parametrize("norm", ["bn", "iabn", "gn"])
def test_size_at_the_papers_width(classes, parameters, norm):
    assert count(models.create("resnet18_cifar", classes=classes, norm=norm)) == parameters


def expected_names():
    """The names of torchvision's resnet18, written out."""

    def norm(path):
        kinds = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        return {f"{path}.{kind}" for kind in kinds}

    names = {"conv1.weight", "fc.weight", "fc.bias"} | norm("bn1")
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            path = f"layer{stage}.{block}"
            names |= {f"{path}.conv1.weight", f"{path}.conv2.weight"}
            names |= norm(f"{path}.bn1") | norm(f"{path}.bn2")
        if stage > 1:
            names |= {f"layer{stage}.0.downsample.0.weight"} | norm(f"layer{stage}.0.downsample.1")
    return names


@pytest.mark.parametrize("norm", ["bn", "iabn"])
def test_state_dict_has_torchvisions_names(norm):
    net = models.create("resnet18_cifar", width=2, norm=norm)
    assert set(net.state_dict()) == expected_names()


def test_bn_and_iabn_weights_are_interchangeable():
    bn, iabn = (models.create("resnet18_cifar", width=2, norm=n) for n in ("bn", "iabn"))
    loaded = iabn.load_state_dict(bn.state_dict())
    assert not loaded.missing_keys
    assert not loaded.unexpected_keys


@pytest.mark.parametrize("channels", [4, 16])
def test_narrow_shortcuts_compute_what_strided_convolutions_do(channels):
    narrow = SubsampledConv(channels, 6, 1, 2, bias=False)
    plain = nn.Conv2d(channels, 6, 1, 2, bias=False)
    plain.load_state_dict(narrow.state_dict())
    x = torch.rand(2, channels, 7, 8)
    assert torch.allclose(narrow(x), plain(x), atol=1e-6)


def test_one_block_per_stage_is_a_resnet10():
    net = models.create("resnet18_cifar", width=2, blocks=1)
    assert [len(getattr(net, f"layer{i}")) for i in (1, 2, 3, 4)] == [1, 1, 1, 1]
    with pytest.raises(SettingError, match="blocks"):
        models.create("resnet18_cifar", blocks=0)


def test_the_stem_keeps_the_resolution_and_every_later_stage_halves_it():
    net = models.create("resnet18_cifar", width=2, classes=3).eval()
    sizes = {}
    for name in ("conv1", "layer1", "layer2", "layer3", "layer4"):
        getattr(net, name).register_forward_hook(
            lambda _m, _i, out, name=name: sizes.update({name: tuple(out.shape[1:])})
        )
    assert net(torch.rand(2, 3, 32, 32)).shape == (2, 3)
    assert list(sizes.values()) == [(2, 32, 32), (2, 32, 32), (4, 16, 16), (8, 8, 8), (16, 4, 4)]


def test_images_are_normalised_inside():
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    net = models.create("resnet18_cifar", width=2, mean=mean, std=std).eval()
    plain = models.create("resnet18_cifar", width=2, mean=(0, 0, 0), std=(1, 1, 1)).eval()
    plain.load_state_dict(net.state_dict())
    x = torch.rand(2, 3, 16, 16)
    by_hand = torch.stack([(x[:, c] - mean[c]) / std[c] for c in range(3)], 1)
    torch.testing.assert_close(net(x), plain(by_hand))
    assert not torch.allclose(net(x), plain(x))


def test_one_channel():
    net = models.create("resnet18_cifar", width=2, channels=1, mean=(0.1,), std=(0.3,)).eval()
    assert net(torch.rand(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize("norm", ["bn", "iabn", "gn"])
def test_norm_and_k_reach_the_layers(norm):
    net = models.create("resnet18_cifar", width=4, norm=norm, k=2.5)
    kind = {"bn": nn.BatchNorm2d, "iabn": InstanceAwareBatchNorm, "gn": nn.GroupNorm}[norm]
    layers = [m for n, m in net.named_modules() if n.rpartition(".")[2].startswith("bn")]
    assert len(layers) == 17
    assert all(type(m) is kind for m in layers)
    assert norm != "iabn" or all(m.k == 2.5 for m in layers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm": "layer"}, r"norm of resnet18_cifar, must be \['bn', 'iabn', 'gn'\], got 'layer'"),
        ({"width": 1}, "width and classes, must be at least 2"),
        ({"classes": 1}, "width and classes, must be at least 2"),
        ({"mean": (0.5,)}, "mean and std of the input, must be 3 values each"),
        ({"std": (1.0, 1.0)}, "mean and std of the input, must be 3 values each"),
        ({"channels": 1}, "must be 1 values each"),
        ({"std": (1.0, 0.0, 1.0)}, "std of the input, must be positive"),
        ({"widht": 4}, "has no setting 'widht'. Did you mean 'width'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        models.create("resnet18_cifar", **settings)


def test_unknown_name():
    with pytest.raises(UnknownName, match="Did you mean 'resnet18_cifar'"):
        models.create("resnet18_cifr")


def test_normalize_leaves_the_state_dict_alone():
    assert not Normalize((0.5,), (0.5,), 1).state_dict()
