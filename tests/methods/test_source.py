"""Source: the model in evaluation mode, whatever was seen before."""

import pytest
import torch

from tests.toys import NETS, make_batches, make_net
from twoshift.methods import Source


@pytest.mark.parametrize("name", NETS)
def test_it_is_the_model(name):
    net = make_net(name)
    live = Source(net.train())  # a model left in training mode is copied in evaluation mode
    net.eval()
    for x in make_batches(name, sizes=(8, 5, 1, 8, 3)):
        with torch.no_grad():
            assert torch.equal(live(x), net(x))


def test_samples_do_not_see_each_other():
    live, (x,) = Source(make_net("resnet_bn")), make_batches("resnet_bn", sizes=(8,))
    one_by_one = torch.cat([live(image[None]) for image in x])
    torch.testing.assert_close(live(x), one_by_one)
