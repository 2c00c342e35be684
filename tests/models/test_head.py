"""Finding the head of any model, and the features before it."""

import pytest
import torch
from torch import nn

from tests.toys import NETS, make_adapter, make_batches, make_net
from twoshift.adapters import attach
from twoshift.errors import HeadError
from twoshift.models.head import capture_features, features, find_head, reinitialise


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
