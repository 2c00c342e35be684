"""Small snapshots: networks with an adapter and an estimate of the labels, some batches old."""

from __future__ import annotations

from tests.toys import CLASSES, make_batches, make_moments, make_net
from twoshift import IdentityAdapter, LabelAware, Paced, attach, logit_adapter
from twoshift.adapters import ANSWER
from twoshift.methods import Source, Streamed

ASSUMES = (0.4, 0.3, 0.15, 0.1, 0.05)
SIZES = (20, 30, 7)


def snapshot(net="resnet_bn", adjusted=True, sizes=SIZES):
    """What `recommended` would build, after some batches."""
    bare = make_net(net)
    if adjusted:
        adapted = attach(bare, logit_adapter(bare, ASSUMES, temperature=1.7))
    else:
        adapted = attach(bare, IdentityAdapter(CLASSES, CLASSES), ANSWER)
    streamed = net == "resnet_bn"
    method = Streamed(adapted, make_moments(bare)) if streamed else Source(adapted)
    bias = [0.3, -0.2, 0.1, 0.0, -0.2]
    live = LabelAware(method, Paced(CLASSES, temperature=0.5, bias=bias, assumes=ASSUMES))
    for x in make_batches(net, sizes):
        live(x)
    return live
