"""A model that twoshift did not train, from the words of a command line.

``FILE.py:FUNCTION`` runs a function of the user's own that returns the network; the other names are
those of `twoshift.models.create`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from twoshift.errors import ModelError, SettingError, TwoshiftError
from twoshift.models import create
from twoshift.models.weights import PACKAGE, load_weights
from twoshift.registry import near_miss

PYTHON = ".py"
FOLDER = "hf:"


def open_model(
    name: str,
    weights: str | Path | None = None,
    classes: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a trained network, in evaluation mode.

    Args:
        name: ``FILE.py:FUNCTION``, the name of one of our models, ``hf:FOLDER`` or ``timm:NAME``.
        weights: A ``.pth`` or ``.safetensors`` file; ``"package"`` for those that come with the
            model, which is the default for ``hf:``. A function may load its own.
        classes: Number of classes of a model that is built by name.
        settings: Further settings of the model or arguments of the function.
    """
    chosen = dict(settings or {})
    file, _, function = name.rpartition(":")
    if name.endswith(PYTHON):
        raise SettingError(f"model {name}", must_be=f"{name}:FUNCTION, which returns the network")
    if file.endswith(PYTHON):
        model = _from_function(Path(file), function, chosen)
    else:
        if classes is not None:
            chosen.setdefault("classes", classes)
        model = create(name, **chosen)
        if weights is None and not name.startswith(FOLDER):
            raise SettingError(
                f"weights of {name}",
                must_be="given, since the model was trained",
                cure="Name their file (--weights FILE), or 'package' for those that come with it.",
            )
        weights = PACKAGE if weights is None else weights
    if weights is not None:
        left = load_weights(model, weights).left
        if left:
            raise SettingError(
                f"classes in {weights}",
                must_be=f"{classes}, as in the data" if classes else "those of the model",
                got=f"another number: {', '.join(left)} do not fit",
            )
    return model.eval()


def _from_function(file: Path, name: str, settings: Mapping[str, Any]) -> nn.Module:
    """Run a function of the user's own file."""
    if not file.is_file():
        raise SettingError(f"no file {file}", cure="Write FILE.py:FUNCTION.")
    spec = importlib.util.spec_from_file_location(f"_twoshift_given_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for their types
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)  # the file may import its neighbours
    try:
        spec.loader.exec_module(module)
        function = getattr(module, name, None)
        if not callable(function):
            names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise SettingError(f"{file} has no function {name!r}", cure=near_miss(name, names))
        model = function(**settings)
    except TwoshiftError:
        raise
    except (Exception, SystemExit) as e:  # whatever the user's code raises; scripts may exit
        raise ModelError(
            f"{file}:{name} failed with {type(e).__name__}: {e}",
            cure="Run it by itself to see where; --set NAME=VALUE gives it arguments.",
        ) from e
    finally:
        sys.path.remove(folder)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{file}:{name}", must_be="an nn.Module", got=type(model).__name__)
    return model
