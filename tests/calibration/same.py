"""Equality of facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch


def same(one, other):
    """Whether facts, or whole calibrations, are equal in value, type and shape."""
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and same(vars(one), vars(other))
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(same(value, other[name]) for name, value in one.items())
        )
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        )
    return type(one) is type(other) and one == other
