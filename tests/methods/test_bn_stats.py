"""BN Stats against torch's batch normalisation in training mode."""

import copy

import pytest
import torch

from tests.methods.slow import batch_norms_in_training
from tests.toys import make_batches, make_net, same
from twoshift.methods import BNStats, Source

SIZES = (8, 5, 2, 8, 3, 9, 8, 4, 7, 6)


@pytest.mark.parametrize("name", ["resnet_bn", "resnet_iabn", "mlp"])
def test_every_batch_is_normalised_by_itself(name):
    net = make_net(name)
    live = BNStats(net)
    for x in make_batches(name, SIZES):
        reference = copy.deepcopy(net).eval()
        batch_norms_in_training(reference)
        with torch.no_grad():
            torch.testing.assert_close(live(x), reference(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet_bn", "mlp"])
def test_by_hand(name):
    """Batch mean and biased variance, put where the running ones are, in evaluation mode."""
    net, (x,) = make_net(name), make_batches(name, (8,))
    by_hand = copy.deepcopy(net)
    for layer in [m for m in by_hand.modules() if hasattr(m, "running_mean")]:

        def own_statistics(layer, args):
            values = args[0].transpose(0, 1).reshape(layer.num_features, -1)
            layer.running_mean = values.mean(1)
            layer.running_var = ((values - values.mean(1, keepdim=True)) ** 2).mean(1)

        layer.register_forward_pre_hook(own_statistics)
    with torch.no_grad():
        torch.testing.assert_close(BNStats(net)(x), by_hand(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet_bn", "resnet_iabn", "mlp"])
def test_nothing_moves(name):
    live = BNStats(make_net(name))
    before = live.state()
    for x in make_batches(name, SIZES):
        live(x)
    assert same(live.state(), before)


def test_it_differs_from_the_source_model():
    x = make_batches("resnet_bn")[0]
    net = make_net("resnet_bn")
    assert not torch.allclose(BNStats(net)(x), Source(net)(x), atol=0.1)
