"""The network of a method as it is now, which predicts without adapting any further."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from twoshift.adapters import adapted_heads
from twoshift.errors import ModelError
from twoshift.methods._streams import LiveStream
from twoshift.methods.base import Method, methods
from twoshift.methods.label_aware import LabelAware
from twoshift.methods.source import Source
from twoshift.methods.streamed import Streamed
from twoshift.models.classifier import prepare
from twoshift.models.norm import AnyBatchNorm, batch_norms, replace_module, sharing


@torch.no_grad()
def frozen(live: Method | LiveStream[Any]) -> nn.Module:
    """A copy of the network in its present state, with plain layers: nothing in it adapts.

    Streamed statistics become the running statistics of plain batch normalisation. Where labels
    are estimated, the adapter is conditioned on the estimate for images to come. An image is then
    predicted in the same way whatever is in its batch, and the method itself is not changed.

    Args:
        live: What `twoshift.recommended` returns, ``streamed`` or ``source``, alone or with an
            adapter and an estimator; or a stream of one. What other methods predict depends on the
            batch.
    """
    if isinstance(live, LiveStream):
        with live._active() as method:
            return frozen(method)
    with live._using(), torch.inference_mode(False):
        core = live.method if isinstance(live, LabelAware) else live
        if not isinstance(core, Source | Streamed):
            raise ModelError(
                "a method that can be frozen",
                must_be="source or streamed, since others predict by the batch",
                got=methods.name_of(type(core)),
                cure="Use twoshift.recommended(model, facts).",
            )
        net = prepare(core.model).eval().requires_grad_(False)
        if isinstance(core, Streamed):
            _fold(net, core)
        if isinstance(live, LabelAware):
            ahead = live.prior_ahead
            for _, head in adapted_heads(net):
                head.prior.copy_(ahead)
        return net


def _fold(net: nn.Module, method: Streamed) -> None:
    """Put plain layers in the place of streamed ones, with the statistics that these have now."""
    statistics = method.frozen_statistics()
    for i, (name, layer) in enumerate(list(batch_norms(net))):
        plain = sharing(layer, AnyBatchNorm)
        if statistics is not None:
            plain.running_mean, plain.running_var = statistics[i]
        replace_module(net, name, plain.eval().requires_grad_(False))
