"""Load weights that were trained elsewhere, from a ``.pth`` or ``.safetensors`` file.

Files are not trusted: no code in them is run, and weights that do not fit the model are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twoshift.errors import CheckpointError, HeadError, MismatchError, ModelError, StorageError
from twoshift.models._torch_files import check_torch_file
from twoshift.models.classifier import unwrap
from twoshift.models.head import find_head
from twoshift.models.hub import HubModel
from twoshift.storage import fingerprint, read_tensors, sha256

PACKAGE = "package"
WRAPPERS = ("state_dict", "model")  # keys that training scripts use for the weights
STATISTICS = (".running_mean", ".running_var")
COUNTER = ".num_batches_tracked"  # missing in older files, and not needed
PLAIN = (Tensor, nn.Parameter)
SHOWN = 5  # names in a message


class Loaded(NamedTuple):
    """The result of `load_weights`.

    Attributes:
        sha256: Hash of the file; of names and values for weights from a package without a file.
        left: Parameters left unchanged: the classifier's, if the numbers of classes differ.
    """

    sha256: str
    left: tuple[str, ...]


def load_weights(model: nn.Module, path: str | Path) -> Loaded:
    """Load weights into ``model``; weights that do not fit are an error and change nothing.

    A classifier with another number of classes is left as it is. Weights of a network with batch
    norm also fit the same network with IABN.

    Args:
        model: Network to load the weights into.
        path: A ``.pth``, ``.pt`` or ``.safetensors`` file with a ``state_dict``, or ``"package"``
            for a backbone whose package provides weights.
    """
    model = unwrap(model)
    source = _packaged(model) if path == PACKAGE else Path(path)
    tensors = read_weights(source) if isinstance(source, Path) else source
    digest = sha256(source) if isinstance(source, Path) else fingerprint(source)
    target = model
    if isinstance(model, HubModel):  # the library's own weights, or those with our normalisation
        target, tensors = model.net, _without_prefix("net.", tensors)
    expected = target.state_dict()
    tensors = {n: t for n, t in tensors.items() if n in expected or not n.endswith(COUNTER)}
    left = _other_classes(target, tensors)
    tensors = {n: t for n, t in tensors.items() if n not in left}
    _check_fit(type(target).__name__, expected, tensors, left)
    _check_values(expected, tensors)
    target.load_state_dict(tensors, strict=False)
    return Loaded(digest, left)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Tensors of a file by name, on the CPU; a prefix ``module.`` of all names is removed."""
    path = Path(path)
    if not path.is_file():
        raise StorageError(f"no weights in {path}", must_be="a file", cure="Check the path.")
    content = read_tensors(path) if path.suffix == ".safetensors" else _unpickled(path)
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path}", must_be="a state_dict", got=type(content).__name__)
    others = [n for n, t in content.items() if not isinstance(n, str) or not isinstance(t, Tensor)]
    if others:
        must_be = f"a state_dict, or one under {' or '.join(map(repr, WRAPPERS))}"
        got = f"entries that are not tensors: {_some(map(str, others))}"
        raise CheckpointError(f"{path}", must_be=must_be, got=got)
    size = path.stat().st_size
    for name, tensor in content.items():
        if problem := _problem(tensor, size):
            raise CheckpointError(
                f"weights in {path}",
                must_be="plain tensors of finite numbers",
                got=f"{problem} in {name}",
                cure="Save plain weights: torch.save(model.state_dict(), path).",
            )
    return _without_prefix("module.", content)


def _without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with a prefix of all names removed."""
    shared = all(name.startswith(prefix) for name in tensors)
    return {name.removeprefix(prefix) if shared else name: t for name, t in tensors.items()}


def _problem(tensor: Tensor, size: int) -> str | None:
    """What cannot be a weight in a tensor of a file of ``size`` bytes."""
    kinds = {
        "a sparse tensor": not tensor.is_nested and tensor.layout != torch.strided,
        "a nested tensor": tensor.is_nested,
        "a quantised tensor": tensor.is_quantized,
        "a tensor without values, on the device meta": tensor.is_meta,
        "complex numbers": tensor.is_complex(),
        f"a tensor of the class {type(tensor).__name__}": type(tensor) not in PLAIN,
    }
    if kind := next((kind for kind, applies in kinds.items() if applies), None):
        return kind
    if tensor.numel() * tensor.element_size() > size:  # one number repeated for ever
        return f"the shape {tuple(tensor.shape)}, of more than the file"
    if tensor.is_floating_point() and tensor.element_size() == 1:  # torch cannot check these
        tensor = tensor.float()
    return None if tensor.isfinite().all() else "NaN or infinity"


def _check_values(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Refuse numbers that the types of the model cannot hold."""
    for name, tensor in tensors.items():
        dtype = expected[name].dtype
        cast = tensor.to(dtype)
        fits = cast.isfinite() if dtype.is_floating_point else cast.to(tensor.dtype) == tensor
        if not fits.all():
            raise CheckpointError(
                f"weights of {name}",
                must_be=f"numbers that fit {dtype}",
                got=f"{tensor.dtype} up to {tensor.abs().max().item():.4g}",
                cure="Create the model with the dtype that the file was saved from.",
            )


def _unpickled(path: Path) -> Any:
    try:
        check_torch_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as e:  # torch raises all kinds of errors for a damaged pickle
        message = str(e).partition("WeightsUnpickler error: ")[2] or str(e)
        reason = message.strip().partition("\n")[0]
        what = f"{path} is damaged, or has more than tensors in it, which is not loaded: {reason}"
        cure = "Download it again, or save only weights: torch.save(model.state_dict(), path)."
        raise CheckpointError(what, cure=cure) from e


def _packaged(model: nn.Module) -> Path | dict[str, Tensor]:
    packaged_weights = getattr(model, "packaged_weights", None)
    if not callable(packaged_weights):
        what = f"no package provides weights of {type(model).__name__}"
        raise ModelError(what, cure="Use a file of weights.")
    return packaged_weights()


def _other_classes(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of the classifier's parameters, if the file has another number of classes."""
    try:
        path, head = find_head(model)
    except HeadError:  # no head to leave out: everything must fit
        return ()
    parameters = {f"{path}.{n}" if path else n: p for n, p in head.named_parameters()}
    same_features = [
        n in tensors and tensors[n].dim() == p.dim() and tensors[n].shape[1:] == p.shape[1:]
        for n, p in parameters.items()
    ]
    if all(same_features) and any(tensors[n].shape != p.shape for n, p in parameters.items()):
        return tuple(parameters)
    return ()


def _check_fit(
    owner: str, expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], left: Iterable[str]
) -> None:
    needed = [n for n in expected if n not in left and not n.endswith(COUNTER)]
    missing = [n for n in needed if n not in tensors]
    unknown = [n for n in tensors if n not in expected]
    shapes = [
        f"{n} {tuple(t.shape)} instead of {tuple(expected[n].shape)}"
        for n, t in tensors.items()
        if n in expected and t.shape != expected[n].shape
    ]
    names_of = {"missing": missing, "not in the model": unknown, "of another shape": shapes}
    problems = [f"{len(names)} {what}: {_some(names)}" for what, names in names_of.items() if names]
    if not problems:
        return
    cure = "Create the model that the file was saved from."
    if unknown and all(n.endswith(STATISTICS) for n in unknown) and not missing:
        cure = "The file's network has batch norm: create the model with norm='bn' or 'iabn'."
    elif missing and all(n.endswith(STATISTICS) for n in missing) and not unknown:
        cure = "The file's network has no batch norm: create the model with norm='gn'."
    raise MismatchError(f"weights do not fit {owner}: {'; '.join(problems)}", cure=cure)


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
