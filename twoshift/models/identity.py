"""Whether two sets of weights are the same in another floating-point type.

`twoshift.storage.fingerprint` tells whether tensors are equal bit for bit. Rounded to another type,
all bits differ; a sketch is what remains the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

TOLERANCE = 0.02  # of a value: several times what bfloat16 rounds away
SMALLEST = 1e-6  # differences below this come from float16, which has no smaller numbers
NAMES = 16  # hexadecimal digits of the hash of names and shapes


def sketch(tensors: Mapping[str, Tensor]) -> str:
    """A short text that stays nearly the same when the tensors are rounded to another type.

    Names and shapes, hashed, and for every floating-point tensor its mean absolute value and the
    value in its middle, four hexadecimal digits each.
    """
    digest, values = hashlib.sha256(), []
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.is_floating_point()}\n".encode())
        if tensor.is_floating_point() and tensor.numel():
            flat = tensor.reshape(-1)
            mean = flat.abs().mean(dtype=torch.promote_types(flat.dtype, torch.float32))
            values += [float(mean), float(flat[len(flat) // 2])]
    bits = torch.tensor(values, dtype=torch.float32).to(torch.bfloat16).view(torch.int16)
    return digest.hexdigest()[:NAMES] + "".join(f"{int(b) & 0xFFFF:04x}" for b in bits)


def same_sketch(a: object, b: object) -> bool:
    """Whether two sketches are of the same tensors, up to rounding."""
    if not isinstance(a, str) or not isinstance(b, str):
        return False
    if a[:NAMES] != b[:NAMES] or len(a) != len(b):
        return False
    try:
        x, y = _values(a), _values(b)
    except ValueError:
        return False
    return torch.allclose(x, y, rtol=TOLERANCE, atol=SMALLEST, equal_nan=True)


def _values(sketched: str) -> Tensor:
    digits = bytes.fromhex(sketched[NAMES:])
    high, low = digits[::2], digits[1::2]
    numbers = [(a << 8 | b) for a, b in zip(high, low, strict=True)]
    signed = [n - 0x10000 if n >= 0x8000 else n for n in numbers]
    return torch.tensor(signed, dtype=torch.int16).view(torch.bfloat16).double()
