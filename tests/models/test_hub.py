"""Backbones of timm and transformers: the right calls, tensors out, their normalisation in."""

import copy
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from tests.models.zoo import NormAct
from tests.toys import make_adapter
from twoshift import methods, models
from twoshift.adapters import attach
from twoshift.errors import MissingExtra, ModelError, SettingError, UnknownName
from twoshift.models.classifier import prepare
from twoshift.models.head import features, find_head, trace_head
from twoshift.models.norm import InstanceAwareBatchNorm, batch_norms
from twoshift.models.weights import load_weights

MEAN, STD = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)


class Body(nn.Module):
    """What both fakes share."""

    def __init__(self, classes, channels, norm=True):
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3)
        self.bn = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.aside = nn.Linear(4, 2)  # the last linear layer in name only
        self.out = nn.Linear(4, classes)

    def logits(self, x):
        return self.out(self.bn(self.conv(x)).relu().mean((2, 3)))


class TimmNet(Body):
    @property
    def pretrained_cfg(self):
        return {"mean": MEAN, "std": STD}

    def forward(self, x):
        return self.logits(x)

    def get_classifier(self):
        return self.out


class TransformersNet(Body):
    def __init__(self, classes, channels):
        super().__init__(classes, channels)
        self.classifier = nn.Sequential(nn.Flatten(), self.out)
        del self.out

    def forward(self, x):
        return SimpleNamespace(logits=self.classifier(self.bn(self.conv(x)).relu().mean((2, 3))))


@pytest.fixture
def timm(monkeypatch):
    """A timm with one model; its pretrained weights are all 0.5."""
    fake, calls = ModuleType("timm"), []

    def create_model(name, pretrained=False, num_classes=1000, in_chans=3):
        calls.append((name, pretrained, num_classes, in_chans))
        if name not in ("small", "no_norm"):
            raise RuntimeError(f"Unknown model ({name})")
        net = TimmNet(num_classes, in_chans, norm=name == "small")
        return filled(net) if pretrained else net

    fake.create_model, fake.calls = create_model, calls
    monkeypatch.setitem(sys.modules, "timm", fake)
    return fake


@pytest.fixture
def transformers(monkeypatch):
    """A transformers with one model on its hub."""
    fake = ModuleType("transformers")

    def config(name, num_channels, id2label, label2id):
        check(name)
        assert label2id == {label: i for i, label in id2label.items()}
        return SimpleNamespace(classes=len(id2label), channels=num_channels)

    def check(name):
        if name != "lab/small":
            raise OSError(f"{name} is not on the hub")

    def pretrained(name, use_safetensors):
        check(name)
        assert use_safetensors
        return filled(TransformersNet(1000, 3))

    def processor(name):
        return {"image_mean": list(MEAN), "image_std": list(STD)}, {}

    fake.AutoConfig = SimpleNamespace(from_pretrained=config)
    fake.AutoModelForImageClassification = SimpleNamespace(
        from_config=lambda c: TransformersNet(c.classes, c.channels), from_pretrained=pretrained
    )
    fake.ImageProcessingMixin = SimpleNamespace(get_image_processor_dict=processor)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    return fake


def filled(net):
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.fill_(0.5 if tensor.is_floating_point() else 3)
    return net


@pytest.fixture(params=["timm:small", "hf:lab/small"])
def name(request):
    request.getfixturevalue("timm" if request.param.startswith("timm") else "transformers")
    return request.param


def test_logits_are_a_tensor_and_images_are_normalised_inside(name):
    net = models.create(name, classes=7).eval()
    x = torch.rand(2, 3, 8, 8)
    by_hand = net.net(torch.stack([(x[:, c] - MEAN[c]) / STD[c] for c in range(3)], 1))
    expected = by_hand if isinstance(by_hand, torch.Tensor) else by_hand.logits
    assert net(x).shape == (2, 7)
    torch.testing.assert_close(net(x), expected)
    assert all(n.startswith("net.") for n in net.state_dict())


def test_own_normalisation_and_channels(name):
    net = models.create(name, classes=7, channels=1, mean=(0.3,), std=(0.2,)).eval()
    assert net.normalize.mean.flatten().tolist() == pytest.approx([0.3])
    assert net(torch.rand(2, 1, 8, 8)).shape == (2, 7)
    with pytest.raises(SettingError, match="must be 1 values each"):
        models.create(name, channels=1)


def test_head_adapter_and_method(name):
    net = models.create(name, classes=5).eval()
    path, head = find_head(net)
    assert path == ("net.out" if name.startswith("timm") else "net.classifier.1")
    assert features(net, torch.rand(2, 3, 8, 8)).shape == (2, 4)
    adapted = attach(net, make_adapter(net))
    assert find_head(adapted)[0] == path
    live = methods.create("tent", adapted)
    assert live(torch.rand(4, 3, 8, 8)).shape == (4, 5)
    assert find_head(copy.deepcopy(net))[1] is not head


def test_iabn_takes_the_place_of_batch_norm(name):
    net = models.create(name, classes=5, norm="iabn", k=2.5)
    (layer,) = [layer for _, layer in batch_norms(net)]
    assert type(layer) is InstanceAwareBatchNorm
    assert layer.k == 2.5
    assert models.create(name, norm="bn").net.bn.__class__ is nn.BatchNorm2d


def test_iabn_takes_the_place_of_timms_norm_with_activation(timm, monkeypatch):
    """The activation stays."""

    def create_model(*_args, **settings):
        net = TimmNet(settings["num_classes"], settings["in_chans"])
        net.bn = NormAct(4)
        return net

    monkeypatch.setattr(timm, "create_model", create_model)
    net = models.create("timm:small", classes=5, norm="iabn").eval()
    assert type(net.net.bn) is InstanceAwareBatchNorm
    with torch.no_grad():
        net.net.bn.act.weight.fill_(-1.0)  # a PReLU that gives absolute values
    net.net.bn.register_forward_hook(lambda _layer, _args, out: seen.append(out))
    seen = []
    x = torch.randn(2, 3, 8, 8)
    net(x)
    assert seen[0].min() >= 0
    assert methods.create("iabn", net)(x).shape == (2, 5)


def test_a_prepared_hub_model_is_the_same(name, tmp_path):
    net = models.create(name, classes=5).eval()
    x = torch.rand(4, 3, 8, 8)
    assert torch.equal(prepare(net)(x), net(x))
    bare = prepare(net.net, mean=MEAN, std=STD)  # the library's own module, as a user has it
    assert torch.equal(bare(x), net(x))
    assert trace_head(net, x) == find_head(net)[0]
    live = methods.create("tent", net)
    live(x)
    live.save(tmp_path / "s")
    assert torch.equal(methods.Method.load(tmp_path / "s", net)(x), live(x))


@pytest.mark.parametrize("norm", ["bn", "iabn"])
def test_no_norm_to_replace(timm, norm):
    with pytest.raises(SettingError, match="norm of no_norm, must be left out, as there is no"):
        models.create("timm:no_norm", norm=norm)
    with pytest.raises(
        SettingError, match="norm of small, must be one of None, 'bn', 'iabn', got 'gn'"
    ):
        models.create("timm:small", norm="gn")


def test_pretrained_weights_but_the_classifier(name):
    state = torch.get_rng_state()
    torch.manual_seed(5)
    plain = models.create(name, classes=7)
    torch.manual_seed(5)
    net = models.create(name, classes=7, pretrained=True)
    torch.set_rng_state(state)
    assert net.net.conv.weight.eq(0.5).all()
    assert net.net.bn.running_var.eq(0.5).all()
    assert torch.equal(find_head(net)[1].weight, find_head(plain)[1].weight)
    loaded = load_weights(net, "package")
    assert len(loaded.left) == 2
    assert len(loaded.sha256) == 64


def test_pretrained_with_all_its_classes(name):
    net = models.create(name, classes=1000, pretrained=True)
    assert find_head(net)[1].weight.eq(0.5).all()


@pytest.mark.parametrize("of", [lambda donor: donor.net, lambda donor: donor], ids=["own", "whole"])
def test_a_file_of_weights_with_and_without_our_prefix(name, of, tmp_path):
    net, donor = (models.create(name, classes=7) for _ in range(2))
    torch.save(of(donor).state_dict(), tmp_path / "w.pth")
    load_weights(net, tmp_path / "w.pth")
    assert torch.equal(net.net.conv.weight, donor.net.conv.weight)


def test_the_calls_timm_gets(timm):
    models.create("timm:small", classes=7, channels=3)
    assert timm.calls == [("small", False, 7, 3)]
    models.create("timm:small", classes=7, pretrained=True)
    assert timm.calls[2:] == [("small", True, 1000, 3)]


def test_names_that_the_libraries_do_not_know(timm, transformers):
    with pytest.raises(ModelError, match=r"timm cannot build 'smal'.*timm\.list_models"):
        models.create("timm:smal")
    with pytest.raises(ModelError, match=r"transformers cannot build 'lab/smal'.*config\.json"):
        models.create("hf:lab/smal")


def test_unknown_normalisation(transformers):
    def nothing(name):
        raise OSError("no preprocessor_config.json")

    transformers.ImageProcessingMixin.get_image_processor_dict = nothing
    with pytest.raises(ModelError, match=r"how its images are normalised\. Set mean and std"):
        models.create("hf:lab/small")
    models.create("hf:lab/small", mean=MEAN, std=STD)


@pytest.mark.parametrize("name", ["tim:small", "timm:", ":x", "folder:x"])
def test_unknown_libraries(name):
    with pytest.raises(UnknownName, match=r"Known: hf:NAME, timm:NAME"):
        models.create(name)


def test_unknown_settings(timm):
    with pytest.raises(SettingError, match="has no setting 'widht'"):
        models.create("timm:small", widht=4)


@pytest.mark.parametrize("name", ["timm", "transformers"])
def test_a_missing_library(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    kind = {"timm": "timm", "transformers": "hf"}[name]
    with pytest.raises(MissingExtra, match=rf"cannot import {name} .*twoshift\[{name}\]"):
        models.create(f"{kind}:resnet18")


def test_a_library_that_breaks_while_it_is_imported(tmp_path, monkeypatch):
    """As timm does beside a torchvision that does not fit torch."""
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms missing')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(MissingExtra, match=r"torchvision::nms missing.*torchvision that matches"):
        models.create("timm:resnet18")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of a library that is not ours
@pytest.mark.parametrize("norm", [None, "iabn"])
def test_the_real_transformers(tmp_path, norm):
    library = pytest.importorskip("transformers")
    config = library.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4
    )
    donor = library.AutoModelForImageClassification.from_config(config).eval()
    donor.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}'
    )
    net = models.create(f"hf:{tmp_path}", classes=7, norm=norm, pretrained=True).eval()
    x = torch.rand(2, 3, 32, 32)
    assert net(x).shape == (2, 7)
    assert torch.equal(
        net.net.resnet.embedder.embedder.convolution.weight,
        donor.resnet.embedder.embedder.convolution.weight,
    )
    if norm is None:
        same = models.create(f"hf:{tmp_path}", classes=4, pretrained=True).eval()
        by_hand = torch.stack([(x[:, c] - MEAN[c]) / STD[c] for c in range(3)], 1)
        torch.testing.assert_close(same(x), donor(by_hand).logits)
    assert find_head(net)[0] == "net.classifier.1"
    assert methods.create("tent" if norm is None else "iabn", net)(x).shape == (2, 7)
