"""Every method x network x adapter on/off, and a plain run of each to compare with."""

import functools

import torch

from tests.toys import NETS, make_batches, make_method, make_net
from twoshift.methods import methods

NO_BATCH_NORM = "it has no batch normalisation whose statistics could be taken from the batch"
NO_IABN = "iabn needs a network that was trained with IABN layers"
INCOMPATIBLE = {
    ("bn_stats", "resnet_gn"): NO_BATCH_NORM,
    ("bn_stats", "vit"): NO_BATCH_NORM,
    ("iabn", "resnet_bn"): NO_IABN,
    ("iabn", "resnet_gn"): NO_IABN,
    ("iabn", "resnet_stem"): NO_IABN,
    ("iabn", "vit"): NO_IABN,
    ("iabn", "mlp"): NO_IABN,
    ("note", "resnet_bn"): NO_IABN,
    ("note", "resnet_gn"): NO_IABN,
    ("note", "resnet_stem"): NO_IABN,
    ("note", "vit"): NO_IABN,
    ("note", "mlp"): NO_IABN,
    ("rotta", "resnet_iabn"): "robust batch norm would replace the IABN layers",
    ("rotta", "resnet_gn"): NO_BATCH_NORM,
    ("rotta", "vit"): NO_BATCH_NORM,
    ("onda", "resnet_gn"): NO_BATCH_NORM,
    ("onda", "vit"): NO_BATCH_NORM,
    ("decoupled", "resnet_gn"): NO_BATCH_NORM,
    ("decoupled", "vit"): NO_BATCH_NORM,
    ("decoupled", "resnet_iabn"): "IABN layers mix by themselves",
    ("matched", "resnet_gn"): NO_BATCH_NORM,
    ("matched", "vit"): NO_BATCH_NORM,
    ("matched", "resnet_iabn"): "IABN layers mix by themselves",
}
NO_ADAPTER = {"logit_adjust"}  # it refuses one: both correct the label shift
CASES = [
    (method, net, adapted)
    for method in methods
    for net in NETS
    for adapted in (False, True)
    if (method, net) not in INCOMPATIBLE and not (adapted and method in NO_ADAPTER)
]


def build(case):
    method, net, adapted = case
    return make_method(method, make_net(net), adapted)


@functools.cache
def plain_run(case):
    """Logits of a plain run over the four batches, and the state after each; computed once."""
    live = build(case)
    logits, states = [], [live.state()]
    for x in make_batches(case[1]):
        logits.append(live(x))
        states.append(live.state())
    return logits, states


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
