"""Tensors as safetensors, their fingerprint, and modules that are built to fit them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twoshift.errors import CheckpointError, StorageError
from twoshift.storage._files import atomic_file, open_regular

if TYPE_CHECKING:
    from torch import Tensor, nn

SHOWN = 3  # of many wrong names


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as the content of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import save

    plain: dict[str, Tensor] = {}
    seen = set()
    try:
        for name, tensor in tensors.items():
            own = tensor.detach().cpu().contiguous()
            memory = own.untyped_storage().data_ptr()
            plain[name] = own.clone() if memory in seen else own  # the format shares no memory
            seen.add(memory)
        return save(plain)
    except (SafetensorError, NotImplementedError, RuntimeError, ValueError, KeyError) as e:
        raise StorageError(
            f"tensors that cannot be saved: {e}",
            must_be="dense, with values, of a type that safetensors has",
        ) from e


def from_bytes(content: bytes, path: Path) -> dict[str, Tensor]:
    """The tensors in the content of a safetensors file, on the CPU."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(content)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, MemoryError) as e:
        raise CheckpointError(f"{path} is not a safetensors file: {e}") from e


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Save tensors as safetensors, atomically."""
    content = to_bytes(tensors)
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Load the tensors of a safetensors file on the CPU."""
    try:
        with open_regular(path) as file:
            content = file.read()
    except (OSError, MemoryError) as e:
        raise CheckpointError(f"cannot read {path}: {e}", cure="Check the path.") from e
    return from_bytes(content, path)


def build_to_fit(build: Callable[[], nn.Module], tensors: Mapping[str, Tensor]) -> nn.Module:
    """Build a module and load ``tensors`` into it.

    The sizes of the module may come from a card, so it is first built without memory for its
    weights and compared with the tensors.
    """
    import torch

    try:
        with torch.device("meta"):
            outline = build().state_dict()
    except (RuntimeError, NotImplementedError) as e:
        if "meta" not in str(e):
            raise
        outline = None  # reads the values of its weights while it is built
    if outline is not None:
        _check_fit(outline, tensors)
    module = build()
    _check_fit(module.state_dict(), tensors)
    module.load_state_dict(dict(tensors))
    return module


def _check_fit(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    wrong = [f"{name} is missing" for name in expected if name not in tensors]
    wrong += [f"{name} is not in the model" for name in tensors if name not in expected]
    for name in expected.keys() & tensors.keys():
        ours, theirs = expected[name], tensors[name]
        if ours.shape != theirs.shape:
            shapes = f"{tuple(theirs.shape)} instead of {tuple(ours.shape)}"
            wrong.append(f"size mismatch of {name}: {shapes}")
        elif ours.dtype != theirs.dtype and not (
            ours.is_floating_point() and theirs.is_floating_point()
        ):
            wrong.append(f"{name} is {theirs.dtype} instead of {ours.dtype}")
    if wrong:
        more = ", ..." if len(wrong) > SHOWN else ""
        raise CheckpointError(f"{', '.join(sorted(wrong)[:SHOWN])}{more}")


def split_tensors(
    owner: str, values: Mapping[str, Any], separator: str = "/"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Values for a card, and the tensors among them, single or by name, as a flat dictionary."""
    import torch

    plain, tensors = {}, {}
    for name, value in values.items():
        path = f"{owner}{separator}{name}"
        if torch.is_tensor(value):
            tensors[path] = value
        elif isinstance(value, Mapping) and any(torch.is_tensor(v) for v in value.values()):
            tensors |= {f"{path}{separator}{part}": tensor for part, tensor in value.items()}
        else:
            plain[name] = value
    return plain, tensors


def join_tensors(
    owner: str, plain: Mapping[str, Any], tensors: Mapping[str, Tensor], separator: str = "/"
) -> dict[str, Any]:
    """The values of ``owner`` that `split_tensors` took apart."""
    values = dict(plain)
    for path, tensor in tensors.items():
        whose, _, rest = path.partition(separator)
        name, nested, part = rest.partition(separator)
        if whose != owner:
            continue
        if not nested:
            values[name] = tensor
        elif isinstance(values.setdefault(name, {}), dict):
            values[name][part] = tensor
        else:
            raise CheckpointError(f"{path} is a tensor and {owner}{separator}{name} a value")
    return values


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and bytes: equal only for tensors with equal bits."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        digest.update(t.reshape(-1).view(dtype=torch.uint8).numpy().data)
    return digest.hexdigest()
