"""Batch normalisation of other kinds, made plain: synchronised, or with the activation inside."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from twoshift.models.norm import AnyBatchNorm, batch_norms, is_plain, replace_module, sharing


def plain_batch_norms(model: nn.Module) -> None:
    """Make synchronised batch norms, and those that include an activation, plain ones, in place.

    Names and tensors stay; dropout and activation follow as a hook. A layer that computes anything
    else is left alone.
    """
    for name, layer in list(batch_norms(model)):
        follows = layer._modules.keys() <= {"drop", "act"}
        known = isinstance(layer, nn.SyncBatchNorm) or layer._modules
        if is_plain(layer) or isinstance(layer, AnyBatchNorm) or not (follows and known):
            continue
        new = sharing(layer, AnyBatchNorm).train(layer.training)
        if layer._modules:
            new.register_forward_hook(_drop_and_act, prepend=True)
        if _compute_the_same(layer, new):
            replace_module(model, name, new)


def _drop_and_act(layer: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    for name in ("drop", "act"):
        if name in layer._modules:
            output = layer.get_submodule(name)(output)
    return output


@torch.no_grad()
def _compute_the_same(layer: _BatchNorm, other: _BatchNorm) -> bool:
    """Whether two layers give the same bits for a random input, whose statistics stay as they are.

    Synchronised ones are compared in evaluation mode only, since training mode needs a GPU.
    """
    dims = {nn.BatchNorm1d: 0, nn.BatchNorm3d: 3}
    spatial = next((n for kind, n in dims.items() if isinstance(layer, kind)), 2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, layer.num_features, *[3] * spatial, generator=generator)
    x = x.to(next((t for t in (*layer.parameters(), *layer.buffers())), x))
    results = []
    for mode in (False,) if isinstance(layer, nn.SyncBatchNorm) else (False, True):
        for each in (layer, other):
            with torch.random.fork_rng():  # for dropout
                torch.manual_seed(0)
                try:
                    results.append(copy.deepcopy(each).train(mode)(x.clone()))
                except Exception:  # it takes something else
                    return False
    return all(map(_equal, results[::2], results[1::2]))


def _equal(a: object, b: object) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
