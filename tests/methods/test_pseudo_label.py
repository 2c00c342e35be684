"""PseudoLabel against a plain loop, sample by sample."""

import pytest
import torch

from tests.methods import slow
from tests.toys import make_batches, make_net, same
from twoshift.errors import SettingError
from twoshift.methods.pseudo_label import PseudoLabel

SIZES = (8, 5, 8, 3, 8, 1, 6, 8, 2, 8, 7)
HAND = {"adam": slow.Adam, "sgd": slow.SGD}


def slow_loss(logits, threshold):
    """Mean of minus the logarithm of the largest probability, over the samples kept."""
    losses = []
    for row in logits:
        p = row.exp() / row.exp().sum()
        values = p.tolist()
        best = values.index(max(values))
        if threshold is None or values[best] > threshold:
            losses.append(-p[best].log())
    return (sum(losses) / len(losses) if losses else None), len(losses)


def run_by_hand(net, batches, optim, lr, threshold, freeze=()):
    slow.batch_norms_in_training(net)
    parameters = list(slow.affine(net, freeze).values())
    optimizer, outputs, kept = HAND[optim](parameters, lr), [], []
    for x in batches:
        logits = net(x)
        loss, count = slow_loss(logits, threshold)
        if loss is not None:
            optimizer.step(torch.autograd.grad(loss, parameters))
        outputs.append(logits.detach())
        kept.append(count)
    return outputs, kept


@pytest.mark.parametrize(
    ("name", "optim", "threshold"),
    [("resnet_bn", "adam", None), ("resnet_bn", "sgd", 0.5), ("resnet_gn", "adam", 0.8)],
)
def test_against_a_plain_loop(name, optim, threshold):
    lr = {"adam": 2e-3, "sgd": 2e-2}[optim]
    batches = [x.double() for x in make_batches(name, SIZES)]
    by_hand = make_net(name).double()
    live = PseudoLabel(make_net(name).double(), lr, optim, threshold)
    logits = [live(x) for x in batches]
    expected, kept = run_by_hand(by_hand, batches, optim, lr, threshold)
    assert threshold is None or 0 < sum(kept) < sum(SIZES)
    torch.testing.assert_close(torch.cat(logits), torch.cat(expected), rtol=1e-6, atol=1e-6)
    moved = slow.affine(live.model)
    for path, wanted in slow.affine(by_hand).items():
        torch.testing.assert_close(moved[path], wanted, rtol=1e-6, atol=1e-6)


def test_nothing_sure_no_step():
    net = make_net("resnet_bn")
    live, batches = PseudoLabel(net, threshold=0.999), make_batches("resnet_bn")
    before = live.state()
    for x in batches:
        live(x)
    assert same(live.state(), before)


def test_only_unfrozen_norm_weights_move_and_reset_clears_the_moments():
    net = make_net("resnet_iabn")
    live = PseudoLabel(net, freeze=["layer4"])
    for x in make_batches("resnet_iabn"):
        live(x)
    moves, source = slow.affine(live.model, ["layer4"]), dict(net.named_parameters())
    for path, parameter in live.model.named_parameters():
        assert torch.equal(parameter, source[path]) == (path not in moves), path
    for path, buffer in net.named_buffers():
        assert torch.equal(live.model.get_buffer(path), buffer), path
    live.reset()
    assert not live.optimizer.state


@pytest.mark.parametrize("threshold", [-0.1, 1, 1.5, float("nan")])
def test_bad_thresholds(threshold):
    with pytest.raises(SettingError, match="threshold, must be from 0, below 1"):
        PseudoLabel(make_net("mlp"), threshold=threshold)
