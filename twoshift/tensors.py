"""Which tensors can be computed with: ordinary ones, with values in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PLAIN = "an ordinary torch.Tensor"


def oddity(x: object) -> str | None:
    """What makes ``x`` no ordinary tensor, in a few words; None for an ordinary one.

    Checked without reading a value: tensors without values, or with another layout than theirs,
    make some operations of torch fail in odd ways and others end the process.
    """
    if not isinstance(x, Tensor):
        return type(x).__name__
    if type(x) not in (Tensor, nn.Parameter):  # masked, fake, uninitialised, nested, ...
        return type(x).__name__
    if x.is_nested:
        return "a nested tensor"
    if x.layout != torch.strided:
        return f"a tensor of layout {x.layout}"
    if x.is_quantized:
        return "a quantised tensor"
    if x.is_meta:
        return "a meta tensor, which has no values"
    return None if _is_whole(x) else "a tensor whose memory was freed"


def _is_whole(x: Tensor) -> bool:
    if not x.numel():
        return True
    last = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size() <= x.untyped_storage().nbytes()
