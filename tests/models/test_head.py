"""Finding the head of any model, and the features before it."""

import pytest
import torch
from torch import nn

from tests.models.zoo import ZOO, Convolutional, Cosine
from tests.toys import CLASSES, NETS, make_adapter, make_batches, make_net
from twoshift import methods
from twoshift.adapters import attach
from twoshift.errors import HeadError
from twoshift.models.head import (
    capture_features,
    class_count,
    features,
    find_head,
    reinitialise,
    trace_head,
)


class Net(nn.Module):
    """Two linear layers before whatever modules are given."""

    def __init__(self, **modules):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        for name, module in modules.items():
            setattr(self, name, module)
        self.aside = nn.Linear(6, 2)  # last in order, and not the head

    def forward(self, x):
        return self.fc(self.body(x))


def test_by_name():
    net = Net(fc=nn.Linear(6, 3))
    assert find_head(net, "aside") == ("aside", net.aside)
    assert find_head(net, "body.0") == ("body.0", net.body[0])


@pytest.mark.parametrize("name", ["fc", "classifier", "head"])
def test_by_usual_name(name):
    net = Net(**{name: nn.Linear(6, 3)})
    assert find_head(net) == (name, getattr(net, name))


@pytest.mark.parametrize("name", ["fc", "classifier", "head"])
def test_the_last_linear_of_a_sequential(name):
    net = Net(**{name: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), nn.Dropout())})
    assert find_head(net) == (f"{name}.2", getattr(net, name)[2])


def test_get_classifier_goes_first():
    class WithGetter(Net):
        def get_classifier(self):
            return self.out

    net = WithGetter(out=nn.Linear(6, 3), fc=nn.Linear(6, 3))
    assert find_head(net) == ("out", net.out)
    net.out = nn.Sequential(nn.Dropout(), nn.Linear(6, 3))
    assert find_head(net) == ("out.1", net.out[1])
    net.out = nn.Identity()  # pooled features only: look elsewhere
    assert find_head(net) == ("fc", net.fc)


def test_the_last_linear_layer_when_nothing_else_tells():
    net = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 3)), nn.Softmax(1))
    assert find_head(net) == ("1.1", net[1][1])


def test_a_linear_model_is_its_own_head():
    net = nn.Linear(4, 3)
    assert find_head(net) == ("", net)


def test_several_candidates_are_listed():
    net = Net(fc=nn.Linear(6, 3), head=nn.Sequential(nn.ReLU(), nn.Linear(6, 3)))
    with pytest.raises(HeadError, match=r"several candidates for its head: fc, head\.1\. Name it"):
        find_head(net)
    assert find_head(net, "fc")[1] is net.fc


def test_no_head():
    with pytest.raises(HeadError, match="no classifier head in Sequential: it has no linear"):
        find_head(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()))


def test_a_usual_name_without_a_linear_layer_is_no_candidate():
    net = Net(head=nn.Identity(), fc=nn.Linear(6, 3))
    assert find_head(net)[0] == "fc"


def test_wrong_names_list_the_linear_layers():
    net = Net(fc=nn.Linear(6, 3))
    with pytest.raises(HeadError, match=r"no module 'fcc'. Its linear layers: body\.0, fc, aside"):
        find_head(net, "fcc")
    with pytest.raises(HeadError, match=r"head 'body', must be an nn\.Linear or a 1x1 .*, got Seq"):
        find_head(net, "body")


@pytest.mark.parametrize("name", NETS)
def test_an_adapted_head_marks_itself(name):
    """The last linear layer is the adapter's by now."""
    net = make_net(name)
    path = find_head(net)[0]
    adapted = attach(net, make_adapter(net))
    linears = [n for n, m in adapted.named_modules() if isinstance(m, nn.Linear)]
    assert linears[-1].startswith(f"{path}.adapter")
    assert find_head(adapted) == (path, adapted.get_submodule(path))
    assert find_head(adapted, path)[0] == path


@pytest.mark.parametrize("name", NETS)
def test_features_are_what_the_head_reads(name):
    net, x = make_net(name), make_batches(name)[0]
    head = find_head(net)[1]
    h = features(net, x)
    assert h.shape == (len(x), head.in_features)
    torch.testing.assert_close(h @ head.weight.T + head.bias, net(x))
    assert not head._forward_pre_hooks


def test_features_equal_a_manual_pass():
    net = Net(fc=nn.Linear(6, 3))
    x = torch.randn(5, 4)
    assert torch.equal(features(net, x), net.body(x))
    assert torch.equal(features(net, x, head=net.body[0]), x)


def test_features_of_a_head_not_used_once():
    net = Net(fc=nn.Linear(6, 3))
    with pytest.raises(HeadError, match="used once in a forward pass, got 0"):
        features(net, torch.randn(5, 4), head=net.aside)


def test_the_hook_goes_away_even_after_an_error():
    net = Net(fc=nn.Linear(6, 3))

    def fail():
        with capture_features(net.fc):
            net(torch.randn(5, 9))

    with pytest.raises(RuntimeError, match="shapes"):
        fail()
    assert not net.fc._forward_pre_hooks


def test_reinitialise_draws_from_the_given_generator():
    heads = [nn.Linear(16, 50) for _ in range(3)]
    for head, seed in zip(heads, (1, 1, 2), strict=True):
        reinitialise(head, torch.Generator().manual_seed(seed))
    assert torch.equal(heads[0].weight, heads[1].weight)
    assert not torch.equal(heads[0].weight, heads[2].weight)
    assert 0.2 < heads[0].weight.abs().max() <= 0.25


def conv(out=3, **settings):
    return nn.Conv2d(6, out, **{"kernel_size": 1, **settings})


@pytest.mark.parametrize("name", ["fc", "classifier", "head", "scores"])
def test_a_convolution_with_the_last_weights(name):
    net = nn.Sequential()
    net.add_module("body", nn.Conv2d(3, 6, 3))
    net.add_module(name, nn.Sequential(nn.Dropout(), conv(), nn.AvgPool2d(2)))
    assert find_head(net) == (f"{name}.1", net.get_submodule(f"{name}.1"))
    assert class_count(net) == 3


def test_a_linear_layer_inside_the_body_is_not_taken_for_a_usual_convolution():
    net = nn.ModuleDict({"gate": nn.Linear(6, 6), "classifier": conv()})
    net.classifier, net.gate = net["classifier"], net["gate"]
    assert find_head(net)[0] == "classifier"


@pytest.mark.parametrize(
    "last",
    [
        conv(kernel_size=3),
        conv(stride=2),
        conv(out=6, groups=2),
        conv(padding=1),
        nn.Sequential(conv(), nn.BatchNorm2d(3)),
    ],
)
def test_convolutions_that_are_no_head(last):
    with pytest.raises(HeadError, match="no classifier head"):
        find_head(nn.Sequential(nn.Conv2d(3, 6, 3), last))


@pytest.mark.parametrize("kind", [lambda: Convolutional(True), lambda: Convolutional(False)])
def test_features_of_a_convolution_are_means_over_positions(kind):
    net, x = kind().eval(), torch.rand(5, 3, 8, 8)
    h = features(net, x)
    assert h.shape == (5, 6)
    torch.testing.assert_close(h, net.body(x).mean((2, 3)))
    weight, bias = net.classifier.weight.flatten(1), net.classifier.bias
    torch.testing.assert_close(h @ weight.T + bias, net(x).flatten(1))


@pytest.mark.parametrize("method", ["lame", "isfda"])
@pytest.mark.parametrize("pool_first", [True, False])
def test_methods_that_read_features_read_those_of_a_convolution(method, pool_first):
    net = Convolutional(pool_first).eval()
    head = nn.Linear(6, CLASSES)
    with torch.no_grad():
        head.weight.copy_(net.classifier.weight.flatten(1))
        head.bias.copy_(net.classifier.bias)
    linear = nn.Sequential(net.body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head).eval()
    x = torch.rand(9, 3, 8, 8)
    ours, theirs = (methods.create(method, n)(x) for n in (net, linear))
    torch.testing.assert_close(ours, theirs)


class Traced(nn.Module):
    """Two linear layers and what becomes of their outputs."""

    def __init__(self, answer):
        super().__init__()
        self.first, self.second, self.answer_of = nn.Linear(4, 3), nn.Linear(4, 3), answer
        with torch.no_grad():
            for layer in (self.first, self.second):
                layer.bias.add_(10)  # all outputs are positive

    def forward(self, x):
        return self.answer_of(self, x)


@pytest.mark.parametrize(
    ("answer", "head"),
    [
        (lambda net, x: net.first(x), "first"),
        (lambda net, x: (net.second(x), net.first(x))[1], "first"),
        (lambda net, x: net.first(x[:, None])[:, 0], "first"),
        (lambda net, x: net.first(x).relu(), None),  # though the values are the same
        (lambda net, x: net.first(x) * 1.0001, None),
        (lambda net, x: net.first(x) + net.second(x), None),
        (lambda net, x: net.first(x).log_softmax(1), None),
        (lambda net, x: (net.first(x) + net.first(x.flip(1))) / 2, None),
        (lambda net, x: net.first(x.flip(1)) * 0 + net.first(x), None),
        (lambda net, x: net.first(x[:, None].expand(-1, 2, -1)).mean(1), None),
        (lambda net, x: net.second(x).detach() - net.second(x) + net.first(x), "first"),
    ],
)
def test_the_head_is_traced(answer, head):
    net, x = Traced(answer), torch.rand(5, 4)
    assert trace_head(net, x) == head


@pytest.mark.parametrize("name", NETS)
def test_the_traced_head_is_the_one_that_is_found(name):
    net, x = make_net(name).train(), make_batches(name)[0]
    statistics = {n: b.clone() for n, b in net.named_buffers()}
    assert trace_head(net, x) == find_head(net)[0]
    assert trace_head(attach(net, make_adapter(net)), x) == find_head(net)[0]
    assert all(torch.equal(b, statistics[n]) for n, b in net.named_buffers())


def test_classes_of_candidates_that_agree():
    assert class_count(ZOO["auxiliary"].bare()) == CLASSES
    assert class_count(nn.DataParallel(ZOO["conv"].bare())) == CLASSES
    with pytest.raises(HeadError, match="no classifier head"):
        class_count(Cosine())
    net = Net(fc=nn.Linear(6, 3), head=nn.Linear(6, 4))
    with pytest.raises(HeadError, match=r"several candidates.*trace_head"):
        class_count(net)
