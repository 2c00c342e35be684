"""Saved folders that somebody tampered with, with checksums that fit again.

`tampered` edits a saved folder in place; `examples` saves one folder of every kind, with the
function that loads it; `load_tampered` loads many. Run by itself, it prints what happened:
``python -m tests.fuzz.tamper 5000 0``.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import shutil
import struct
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.adapters import cases
from tests.saved import as_first_version, card_in, refit
from tests.toys import CLASSES, make_batches, make_method, make_moments, make_net
from twoshift import estimators, methods, models
from twoshift.adapters import adapters, attach, load_adapter, logit_adapter, save_adapter
from twoshift.calibration import Calibration, load_calibration, save_calibration
from twoshift.calibration.base import FOLDER
from twoshift.errors import TwoshiftError, TwoshiftWarning
from twoshift.methods import LabelAware, Matched, Method
from twoshift.storage import saved_files
from twoshift.train.checkpoint import SourceCard, load_source, save_source

Loader = Callable[[Path], Any]
DEEP = 100_000
VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 3, 10**9, 10**12, 2**63, 2**64, 10**30]
VALUES += [0.5, -0.0, 1e308, -1e308, 5e-324, math.nan, math.inf, "", "x", "x" * 5000, "..", "\0"]
VALUES += ["../../etc/passwd", "\ud800", [], {}, [[]], [0] * 1000, {"": {}}, [None], "é" * 90]
DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.int8, torch.float8_e4m3fn]
KEYS = ["", "x", "optimizer.0.exp_avg", "optimizer.99.step", "optimizer.x.y", "optimizer.", "a/b/c"]
KEYS += ["memory.images", "memory.", "estimator.rows", "estimator.", "generator", "method/fisher"]
KEYS += ["method/moments/x", "running.x.y", "facts", "é", "x" * 300, "../x", "__metadata__"]


def tampered(folder: Path, rng: random.Random) -> str:
    """Tamper with a saved folder, in place, and say how; its checksums fit what it says then."""
    tamper = rng.choice([_in_card, _in_card, _in_tensors, _in_tensors, _in_bytes, _in_files])
    return tamper(folder, rng)


def _in_card(folder: Path, rng: random.Random) -> str:
    """One to three values of the card are changed, taken away, added or renamed."""
    card, how = card_in(folder), []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        holder, key = rng.choice(list(_places(card)))
        action = rng.choice(["replace", "replace", "replace", "nudge", "remove", "add", "rename"])
        if action == "replace":
            holder[key] = copy.deepcopy(rng.choice([*VALUES, _name(rng)]))
        elif action == "nudge":
            holder[key] = _nudged(holder[key], rng)
        elif action == "remove":
            del holder[key]
        elif action == "add" and isinstance(holder, dict):
            holder[rng.choice(["x", "name", "model", "self", "window", *KEYS])] = rng.choice(VALUES)
        elif isinstance(holder, dict):
            holder[rng.choice(["x", "y", "settings"])] = holder.pop(key)
        how.append(f"{action} {key!r}")
    if not rng.randrange(20):
        card["deep"] = _nested(rng.choice([20, 40, 900]))
        how.append("deep")
    refit(folder, card)
    return f"card: {', '.join(how)}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Everything in a card that could be changed: holders and keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _name(rng: random.Random) -> str:
    registry = rng.choice([methods.methods, estimators.estimators, adapters, models.models])
    return rng.choice(list(registry))


def _nudged(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice([value + 1, value - 1, -value, value * 1000, float(value), str(value)])
    if isinstance(value, str):
        return rng.choice([value[:-1], value + "x", value.upper(), [value]])
    if isinstance(value, list):
        return rng.choice([value[:-1], [*value, *value[:1]], value * 3, value[::-1], [value]])
    return rng.choice([[value], {"x": value}])


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def _in_tensors(folder: Path, rng: random.Random) -> str:
    """One to three tensors of a file get another shape, type, name or content."""
    name, path = rng.choice(sorted(saved_files(folder).items()))
    tensors, how = load_file(path), []
    for _ in range(rng.choice([1, 1, 2, 3])):
        if not tensors:
            break
        key = rng.choice(sorted(tensors))
        action = rng.choice(
            ["shape", "shape", "dtype", "remove", "add", "rename", "values", "swap"]
        )
        if action == "shape":
            tensors[key] = _reshaped(tensors[key], rng)
        elif action == "dtype":
            tensors[key] = _converted(tensors[key], rng.choice(DTYPES))
        elif action == "remove":
            del tensors[key]
        elif action == "add":
            tensors[rng.choice(KEYS[:-1])] = torch.zeros(rng.choice([(), (1,), (3, 2), (0, 9)]))
        elif action == "rename":
            tensors[rng.choice(KEYS[:-1])] = tensors.pop(key)
        elif action == "values":
            tensors[key] = _refilled(tensors[key], rng)
        else:
            other = rng.choice(sorted(tensors))
            tensors[key], tensors[other] = tensors[other], tensors[key]
        how.append(f"{action} {key!r}")
    save_file({k: t.contiguous().clone() for k, t in tensors.items()}, path)
    refit(folder, card_in(folder))
    return f"{name}: {', '.join(how)}"


def _reshaped(tensor: Tensor, rng: random.Random) -> Tensor:
    flat = tensor.reshape(-1)
    return rng.choice(
        [
            lambda: flat,
            lambda: flat[:-1],
            lambda: flat[:0],
            lambda: flat[:1].reshape(()) if len(flat) else flat,
            lambda: torch.cat([flat, flat]),
            lambda: tensor[None],
            lambda: tensor.transpose(0, -1) if tensor.dim() else tensor[None],
            lambda: torch.zeros((0, 10**12), dtype=tensor.dtype),
            lambda: torch.zeros(1, dtype=tensor.dtype),
            lambda: torch.zeros((1,) * 70, dtype=tensor.dtype),
        ]
    )()


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(tensor.shape, dtype=dtype)


def _refilled(tensor: Tensor, rng: random.Random) -> Tensor:
    if tensor.dtype == torch.bool:
        return ~tensor
    if tensor.is_floating_point() or tensor.is_complex():
        value = rng.choice([0.0, -1.0, 1e30, math.nan, math.inf])
        return torch.full(tensor.shape, value).to(tensor.dtype)
    limits = torch.iinfo(tensor.dtype)
    return torch.full_like(tensor, rng.choice([0, 1, limits.min, limits.max]))


def _in_bytes(folder: Path, rng: random.Random) -> str:
    """Bits of a file are flipped, in its header or its data, or the file is cut or replaced."""
    name, path = rng.choice(sorted(saved_files(folder).items()))
    raw = bytearray(path.read_bytes())
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    action = rng.choice(["header", "header", "length", "data", "cut", "longer", "rubbish"])
    if action == "length":
        raw[:8] = struct.pack("<Q", rng.choice([0, 1, 7, 2**40, 2**63, 2**64 - 1, header]))
    elif action == "cut":
        del raw[rng.randrange(len(raw)) :]
    elif action == "longer":
        raw += b"x"
    elif action == "rubbish":
        raw = bytearray(rng.choice([b"", b"\x80\x04K\x01.", b"{}", bytes(64), b"\xff" * 64]))
    else:
        start, end = (8, header) if action == "header" else (header, len(raw))
        for _ in range(rng.choice([1, 1, 2, 8])):
            if end > start:
                raw[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(raw))
    refit(folder, card_in(folder))
    return f"bytes of {name}: {action}"


def _in_files(folder: Path, rng: random.Random) -> str:
    """Files are missing, renamed, exchanged, or something else than files; or it is the card."""
    card, path = card_in(folder), folder / "card.json"
    name = rng.choice(sorted(card["files"]))
    file = saved_files(folder)[Path(name).stem if isinstance(card["files"][name], str) else name]
    action = rng.choice(["missing", "renamed", "exchanged", "unlisted", "elsewhere", "link"])
    action = rng.choice([action, "fifo", "folder", "deep", "encoding", "constant", "fifo card"])
    if action in ("missing", "fifo", "folder"):
        file.unlink()
    if action == "renamed":
        file.rename(folder / "renamed.safetensors")
        card["files"][name] = {"file": "renamed.safetensors", "sha256": ""}
    elif action == "exchanged":
        other = rng.choice(sorted(card["files"]))
        card["files"][name], card["files"][other] = card["files"][other], card["files"][name]
    elif action == "unlisted":
        del card["files"][name]
    elif action == "elsewhere":
        place = rng.choice(["../card.json", "/etc/passwd", "..", ".", "a/b", "", "x\0", "x" * 300])
        card["files"][name] = {"file": place, "sha256": "0" * 64}
    elif action == "link":
        file.rename(folder.parent / f"{folder.name}-outside")
        file.symlink_to(folder.parent / f"{folder.name}-outside")
    elif action == "fifo":
        os.mkfifo(file)
    elif action == "folder":
        file.mkdir()
    refit(folder, card)
    if action == "deep":
        path.write_text(rng.choice(["[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "0" + "}" * DEEP]))
    elif action == "encoding":
        path.write_bytes(rng.choice([b"\xff\xfe\x00", path.read_text().encode("utf-16"), b"\0"]))
    elif action == "constant":
        path.write_text(path.read_text().replace("{", '{"kind": NaN, ', 1))
    elif action == "fifo card":
        path.unlink()
        os.mkfifo(path)
    return f"files: {action} {name}"


def examples(root: Path) -> dict[str, tuple[Path, Loader]]:
    """Saved folders of every kind in ``root``, each with the function that loads it."""
    return {**dict(_states(root)), **dict(_adapters(root)), **dict(_models(root))}


def _states(root: Path) -> Iterator[tuple[str, tuple[Path, Loader]]]:
    net, iabn = make_net("resnet_bn"), make_net("resnet_iabn")
    batches = make_batches("resnet_bn")
    confusion = (torch.eye(CLASSES) + 0.1) / (CLASSES * (1 + 0.1 * CLASSES))
    live = {name: make_method(name, net, True) for name in ("tent", "cotta", "rotta")}
    live |= {name: make_method(name, net, False) for name in ("onda", "eata", "sar", "delta")}
    live["note"] = make_method("note", iabn, True)
    matched = Matched(attach(net, logit_adapter(net)), make_moments(net))
    bbse = estimators.create("bbse", CLASSES, confusion=confusion, window=8)
    live["matched"] = LabelAware(matched, bbse)
    tent = make_method("tent", attach(net, cases.make("classwise", net)), False)
    live["em"] = LabelAware(tent, estimators.create("em", CLASSES, bias=torch.zeros(CLASSES)))
    for name, method in live.items():
        for x in batches[:2]:
            method(x)
        folder, bare = root / name, iabn if name == "note" else net
        method.save(folder)
        if name == "em":
            as_first_version(folder)
        yield name, (folder, partial(Method.load, model=bare))


def _adapters(root: Path) -> Iterator[tuple[str, tuple[Path, Loader]]]:
    net = make_net("resnet_bn")
    for name in cases.NAMES:
        save_adapter(root / f"adapter-{name}", cases.make(name, net), {"training": {"seed": 0}})
        yield f"adapter-{name}", (root / f"adapter-{name}", load_adapter)


def _models(root: Path) -> Iterator[tuple[str, tuple[Path, Loader]]]:
    settings = {"classes": 3, "width": 4, "blocks": 1, "mean": [0.5] * 3, "std": [0.2] * 3}
    net = models.create("resnet18_cifar", **settings)
    card = SourceCard(
        "resnet18_cifar", settings, ["a", "b", "c"], [9, 4, 1], "toy", {}, "cross_entropy", {}, 0
    )
    save_source(root / "source", net, card)
    yield "source", (root / "source", load_source)
    facts = {"temperature": 1.5, "bias": torch.zeros(3), "confusion": torch.eye(3) / 3}
    named = {"moments": {"bn1": torch.zeros(2, 3, 4)}, "fisher": None}
    save_calibration(root, Calibration(facts, facts, True, 2, "0" * 64, named))
    yield "calibration", (root / FOLDER, _load_calibration)


def _load_calibration(folder: Path) -> Calibration | None:
    inside = folder.parent / f"{folder.name}-source"
    inside.mkdir()
    folder.rename(inside / FOLDER)
    return load_calibration(inside, "0" * 64)


def load_tampered(count: int, seed: int, use: Callable[[Any], None] | None = None) -> Counter[str]:
    """Load ``count`` tampered folders; returns how many were refused by which error, or loaded.

    Args:
        count: How many.
        seed: Seed of what is done to them.
        use: What to do with whatever was loaded; it may refuse, too.

    Raises:
        AssertionError: Anything but a TwoshiftError came out of it.
    """
    happened = Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        known = examples(root / "whole")
        for i in range(count):
            rng = random.Random(f"{seed} {i}")
            example, (folder, load) = rng.choice(sorted(known.items()))
            copied = shutil.copytree(folder, root / "tampered" / str(i))
            how = tampered(copied, rng)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", TwoshiftWarning)  # rounded to another type
                    loaded = load(copied)
                    if use is not None:
                        use(loaded)
                happened["loaded"] += 1
            except TwoshiftError as e:
                happened[type(e).__name__] += 1
            except Exception as e:
                raise AssertionError(f"{example}, {how} ({seed} {i})") from e
            finally:
                shutil.rmtree(root / "tampered")
    return happened


if __name__ == "__main__":
    sys.stdout.write(json.dumps(load_tampered(int(sys.argv[1]), int(sys.argv[2]))) + "\n")
