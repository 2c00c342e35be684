"""Weights of other people's training: a ``.pth`` or ``.safetensors`` file into any model.

Files are untrusted: nothing in them is run, and they fit entirely or are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twoshift.errors import CheckpointError, HeadError, MismatchError, ModelError, StorageError
from twoshift.models.head import find_head
from twoshift.models.hub import HubModel
from twoshift.storage import fingerprint, read_tensors, sha256

PACKAGE = "package"
WRAPPERS = ("state_dict", "model")  # what training scripts call the weights among other things
STATISTICS = (".running_mean", ".running_var")
COUNTER = ".num_batches_tracked"  # older files lack it; nobody reads it
SHOWN = 5


class Loaded(NamedTuple):
    """What `load_weights` did.

    Attributes:
        sha256: Of the file; of names and values where a package brought the weights by itself.
        left: Names of what stayed as it was: the classifier, where the numbers of classes differ.
    """

    sha256: str
    left: tuple[str, ...]


def load_weights(model: nn.Module, path: str | Path) -> Loaded:
    """Fill ``model`` from a file; what does not fit is an error, and then nothing has changed.

    A classifier of another number of classes stays as it is. Weights of a batch-norm network fit
    one with IABN.

    Args:
        model: Any module; one with IABN or BN, GN where the file's network had it.
        path: A ``.pth``, ``.pt`` or ``.safetensors`` file with a ``state_dict``, or ``"package"``
            for a backbone whose package brings weights.
    """
    if path == PACKAGE:
        tensors, digest = _packaged(model)
    else:
        tensors, digest = read_weights(path), sha256(Path(path))
    target = model.net if isinstance(model, HubModel) else model
    wanted = target.state_dict()
    tensors = {n: t for n, t in tensors.items() if n in wanted or not n.endswith(COUNTER)}
    left = _other_classes(target, tensors)
    tensors = {n: t for n, t in tensors.items() if n not in left}
    _check_fit(type(target).__name__, wanted, tensors, left)
    target.load_state_dict(tensors, strict=False)
    return Loaded(digest, left)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU; ``module.`` in front of all names is cut off."""
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
        raise CheckpointError(
            f"{path}",
            must_be=f"a state_dict, or one under {' or '.join(map(repr, WRAPPERS))}",
            got=f"other things in it: {_some(map(str, others))}",
        )
    spoilt = [n for n, t in content.items() if not t.isfinite().all()]
    if spoilt:
        raise CheckpointError(
            f"{path}", must_be="finite", got=f"NaN or infinity in {_some(spoilt)}"
        )
    prefix = "module." if all(n.startswith("module.") for n in content) else ""
    return {n.removeprefix(prefix): t for n, t in content.items()}


def _unpickled(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # a damaged pickle makes torch raise anything
        found = str(e).partition("WeightsUnpickler error: ")[2] or str(e)
        reason = found.strip().partition("\n")[0]
        raise CheckpointError(
            f"{path} is damaged, or carries more than tensors, which is not run: {reason}",
            cure="Fetch it again, or save it anew: torch.save(model.state_dict(), path).",
        ) from e


def _packaged(model: nn.Module) -> tuple[dict[str, Tensor], str]:
    bring = getattr(model, "packaged_weights", None)
    if not callable(bring):
        raise ModelError(
            f"no package brings weights of {type(model).__name__}", cure="Name a file of weights."
        )
    brought: Path | dict[str, Tensor] = bring()
    if isinstance(brought, Path):
        return read_weights(brought), sha256(brought)
    return brought, fingerprint(brought)


def _other_classes(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of the classifier's parameters where the file has another number of classes."""
    try:
        path, head = find_head(model)
    except HeadError:  # then everything must fit
        return ()
    own = {f"{path}.{n}" if path else n: p for n, p in head.named_parameters()}
    same_but_classes = [
        n in tensors and tensors[n].dim() == p.dim() and tensors[n].shape[1:] == p.shape[1:]
        for n, p in own.items()
    ]
    if all(same_but_classes) and any(tensors[n].shape != p.shape for n, p in own.items()):
        return tuple(own)
    return ()


def _check_fit(
    owner: str, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], left: Iterable[str]
) -> None:
    missing = [n for n in wanted if n not in given and n not in left and not n.endswith(COUNTER)]
    unknown = [n for n in given if n not in wanted]
    shapes = [
        f"{n} {tuple(t.shape)} instead of {tuple(wanted[n].shape)}"
        for n, t in given.items()
        if n in wanted and t.shape != wanted[n].shape
    ]
    problems = {"missing": missing, "not in the model": unknown, "of other shape": shapes}
    told = [f"{len(names)} {what}: {_some(names)}" for what, names in problems.items() if names]
    if not told:
        return
    cure = "Create the model that the file was made from."
    if unknown and all(n.endswith(STATISTICS) for n in unknown) and not missing:
        cure = "The file is of a batch-norm network: create the model with norm='bn' or 'iabn'."
    elif missing and all(n.endswith(STATISTICS) for n in missing) and not unknown:
        cure = "The file's network has no batch norm: create the model with norm='gn'."
    raise MismatchError(f"weights do not fit {owner}: {'; '.join(told)}", cure=cure)


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
