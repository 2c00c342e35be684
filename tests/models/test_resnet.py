"""ResNets: size, cost, names, settings, and that images are normalised inside."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from twoshift import models
from twoshift.bench.cost import cost
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


# torchvision's list: parameters, and 10^9 multiply-adds at 224 pixels
PUBLISHED = {
    "resnet18": (11_689_512, 1.81),
    "resnet34": (21_797_672, 3.66),
    "resnet50": (25_557_032, 4.09),
    "resnet101": (44_549_160, 7.80),
    "resnext50_32x4d": (25_028_904, 4.23),
}
DEPTHS = {
    "resnet18": (2, 2, 2, 2),
    "resnet18_cifar": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnext50_32x4d": (3, 4, 6, 3),
}
SLIM = {"resnext50_32x4d": 16}


def slim(name, **settings):
    return models.create(name, **{"width": SLIM.get(name, 4), "classes": 3, **settings})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_size_and_cost(name):
    measured = cost(name, {}, 1000, 224)
    assert measured.parameters == PUBLISHED[name][0]
    assert measured.macs / 1e9 == pytest.approx(PUBLISHED[name][1], rel=0.01)


def expected_names(name):
    """The names of torchvision's networks, written out."""

    def norm(path):
        kinds = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        return {f"{path}.{kind}" for kind in kinds}

    deep = name not in ("resnet18", "resnet18_cifar", "resnet34")
    names = {"conv1.weight", "fc.weight", "fc.bias"} | norm("bn1")
    for stage, depth in enumerate(DEPTHS[name], start=1):
        for block in range(depth):
            path = f"layer{stage}.{block}"
            for i in (1, 2, 3) if deep else (1, 2):
                names |= {f"{path}.conv{i}.weight"} | norm(f"{path}.bn{i}")
        if stage > 1 or deep:
            names |= {f"layer{stage}.0.downsample.0.weight"} | norm(f"layer{stage}.0.downsample.1")
    return names


@pytest.mark.parametrize("norm", ["bn", "iabn"])
@pytest.mark.parametrize("name", DEPTHS)
def test_state_dict_has_torchvisions_names(name, norm):
    assert set(slim(name, norm=norm).state_dict()) == expected_names(name)


def slow_forward(name, state, x):
    """The network written out with functions, from the names in its ``state_dict``."""

    def conv(path, x, stride=1, groups=1):
        weight = state[f"{path}.weight"]
        return F.conv2d(x, weight, None, stride, weight.shape[-1] // 2, groups=groups)

    def norm(path, x):
        read = [state[f"{path}.{n}"] for n in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(x, *read)

    deep = name not in ("resnet18", "resnet34")
    x = F.max_pool2d(norm("bn1", conv("conv1", x, 2)).relu(), 3, 2, 1)
    for stage, depth in enumerate(DEPTHS[name], start=1):
        for block in range(depth):
            path, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            if deep:
                groups = 32 if name.startswith("resnext") else 1
                h = norm(f"{path}.bn1", conv(f"{path}.conv1", x)).relu()
                h = norm(f"{path}.bn2", conv(f"{path}.conv2", h, stride, groups)).relu()
                h = norm(f"{path}.bn3", conv(f"{path}.conv3", h))
            else:
                h = norm(f"{path}.bn1", conv(f"{path}.conv1", x, stride)).relu()
                h = norm(f"{path}.bn2", conv(f"{path}.conv2", h))
            if block == 0 and (stage > 1 or deep):
                x = norm(f"{path}.downsample.1", conv(f"{path}.downsample.0", x, stride))
            x = (h + x).relu()
    return x.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_forward_is_the_published_network(name):
    torch.manual_seed(0)
    net = slim(name).eval()
    x, mean, std = torch.rand(2, 3, 70, 64), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    with torch.no_grad():
        for path, layer in net.named_modules():
            if isinstance(layer, nn.BatchNorm2d):  # weights that tell the layers apart
                layer.running_mean.normal_(0, 0.1), layer.running_var.uniform_(0.5, 1.5)
                last = path.endswith("bn3" if hasattr(net.layer1[0], "bn3") else "bn2")
                layer.weight.uniform_(0.1, 0.5) if last else layer.weight.uniform_(0.5, 1.5)
        by_hand = torch.stack([(x[:, c] - mean[c]) / std[c] for c in range(3)], 1)
        expected = slow_forward(name, net.state_dict(), by_hand)
        assert expected.std() > 1e-3
        torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)


def test_a_seed_keeps_giving_the_same_small_network():
    """Trainings of earlier versions can be repeated; numbers of version 0.1."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = models.create("resnet18_cifar", width=4, classes=3)
    drawn = {
        "conv1.weight": [0.0417607, -0.2890082, 0.3293501],
        "layer2.0.downsample.0.weight": [0.0251765, -0.6235515, -0.0249959],
        "layer4.1.conv2.weight": [-0.1084335, -0.0584326, -0.0725344],
        "fc.weight": [-0.1376881, -0.0499248, -0.1513164],
    }
    for name, first in drawn.items():
        assert net.get_parameter(name).flatten()[:3].tolist() == pytest.approx(first, abs=1e-5)


def test_a_resnext_has_32_groups():
    with pytest.raises(SettingError, match="width, must be a multiple of 16, got 8"):
        models.create("resnext50_32x4d", width=8)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("norm", ["iabn", "gn"])
def test_other_norms_learn(name, norm):
    net = slim(name, norm=norm).train()
    net(torch.rand(2, 3, 64, 64)).logsumexp(1).sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_group_norm_at_an_odd_width():
    net = models.create("resnet18", width=20, norm="gn")
    groups = [m.num_groups for m in net.modules() if isinstance(m, nn.GroupNorm)]
    assert {groups[0], groups[-1]} == {10, 32}
    assert all(
        m.num_channels % m.num_groups == 0 for m in net.modules() if hasattr(m, "num_groups")
    )


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
        ({"norm": "layer"}, "norm of the network, must be one of 'bn', 'iabn', 'gn', got 'layer'"),
        ({"width": 1}, "width of the network, must be a whole number from 2, got 1"),
        ({"classes": 1}, "classes of the network, must be a whole number from 2, got 1"),
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
