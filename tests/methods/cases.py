"""Every method x network x adapter on/off."""

from typing import Any

import pytest

from tests.toys import NETS, large_steps, make_adapter, make_batches, make_net
from twoshift.methods import methods
from twoshift.testing import MethodCase

NO_BATCH_NORM = "it has no batch normalisation whose statistics could be taken from the batch"
NO_IABN = "iabn needs a network that was trained with IABN layers"
INCOMPATIBLE = {
    ("bn_stats", "resnet_gn"): NO_BATCH_NORM,
    ("bn_stats", "vit"): NO_BATCH_NORM,
    ("bn_stats", "convnext"): NO_BATCH_NORM,
    ("iabn", "resnet_bn"): NO_IABN,
    ("iabn", "resnet_gn"): NO_IABN,
    ("iabn", "resnet_stem"): NO_IABN,
    ("iabn", "vit"): NO_IABN,
    ("iabn", "convnext"): NO_IABN,
    ("iabn", "mlp"): NO_IABN,
    ("note", "resnet_bn"): NO_IABN,
    ("note", "resnet_gn"): NO_IABN,
    ("note", "resnet_stem"): NO_IABN,
    ("note", "vit"): NO_IABN,
    ("note", "convnext"): NO_IABN,
    ("note", "mlp"): NO_IABN,
    ("rotta", "resnet_iabn"): "robust batch norm would replace the IABN layers",
    ("rotta", "resnet_gn"): NO_BATCH_NORM,
    ("rotta", "vit"): NO_BATCH_NORM,
    ("rotta", "convnext"): NO_BATCH_NORM,
    ("onda", "resnet_gn"): NO_BATCH_NORM,
    ("onda", "vit"): NO_BATCH_NORM,
    ("onda", "convnext"): NO_BATCH_NORM,
    ("decoupled", "resnet_gn"): NO_BATCH_NORM,
    ("decoupled", "vit"): NO_BATCH_NORM,
    ("decoupled", "convnext"): NO_BATCH_NORM,
    ("decoupled", "resnet_iabn"): "IABN layers mix by themselves",
    ("matched", "resnet_gn"): NO_BATCH_NORM,
    ("matched", "vit"): NO_BATCH_NORM,
    ("matched", "convnext"): NO_BATCH_NORM,
    ("matched", "resnet_iabn"): "IABN layers mix by themselves",
    ("streamed", "resnet_gn"): NO_BATCH_NORM,
    ("streamed", "vit"): NO_BATCH_NORM,
    ("streamed", "convnext"): NO_BATCH_NORM,
    ("streamed", "resnet_iabn"): "IABN layers mix by themselves",
    ("hybrid_ttn", "resnet_gn"): NO_BATCH_NORM,
    ("hybrid_ttn", "vit"): NO_BATCH_NORM,
    ("hybrid_ttn", "convnext"): NO_BATCH_NORM,
    ("hybrid_ttn", "resnet_iabn"): "IABN layers mix by themselves",
    ("unmix_tns", "resnet_gn"): NO_BATCH_NORM,
    ("unmix_tns", "vit"): NO_BATCH_NORM,
    ("unmix_tns", "convnext"): NO_BATCH_NORM,
    ("unmix_tns", "resnet_iabn"): "IABN layers mix by themselves",
    ("unmix_tns", "mlp"): "it has only BatchNorm1d, which keeps the running statistics",
    ("balanced_bn", "resnet_gn"): NO_BATCH_NORM,
    ("balanced_bn", "vit"): NO_BATCH_NORM,
    ("balanced_bn", "convnext"): NO_BATCH_NORM,
    ("balanced_bn", "resnet_iabn"): "balanced batch norm would replace the IABN layers",
    ("tribe", "resnet_gn"): NO_BATCH_NORM,
    ("tribe", "vit"): NO_BATCH_NORM,
    ("tribe", "convnext"): NO_BATCH_NORM,
    ("tribe", "resnet_iabn"): "balanced batch norm would replace the IABN layers",
}


def _cases() -> list[MethodCase]:
    nets = {name: make_net(name) for name in NETS}
    return [
        MethodCase(
            methods[method],
            model,
            large_steps(method, model),
            make_adapter(model) if adapted else None,
            make_batches(net),
            f"{method}-{net}-{'adapter' if adapted else 'plain'}",
        )
        for method in methods
        for net, model in nets.items()
        for adapted in (False, True)
        if (method, net) not in INCOMPATIBLE
    ]


def _param(case: MethodCase) -> Any:
    # larger images or more layers, and no kind of layer that resnet_bn or vit does not have
    rare = any(net in case.name for net in ("stem", "convnext"))
    return pytest.param(case, id=case.name, marks=pytest.mark.slow if rare else ())


CASES = _cases()
PARAMS = [_param(case) for case in CASES]
