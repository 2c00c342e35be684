"""Tampered folders are loaded and used: refused, or as good as any other.

A case is one folder of `tests.fuzz.tamper`, or one of the facts and streams here.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import twoshift
from tests.fuzz.batches import build, calibration
from tests.fuzz.tamper import Loader, examples, tampered
from tests.fuzz.workers import Case
from tests.toys import CLASSES, make_batches, make_net
from twoshift.adapters import Adapter, attach
from twoshift.calibration import Calibration
from twoshift.errors import TwoshiftError
from twoshift.methods import Method, Source
from twoshift.methods._streams import LiveStream
from twoshift.train.checkpoint import SourceModel

CALIBRATED = ("resnet_bn", "vit", "mlp")


def prepare(folder: Path) -> Case:
    """See `tests.fuzz.workers`."""
    known = {**examples(folder / "whole"), **_of_calibrations(folder), **_of_streams(folder)}
    names = sorted(known)

    def try_one(rng: random.Random, case: int) -> Counter[str]:
        name = names[case % len(names)]
        saved, load = known[name]
        copied = shutil.copytree(saved, folder / "tampered" / str(case))
        how = tampered(copied, rng)
        try:
            use(load(copied))
            happened = "taken"
        except TwoshiftError as e:
            happened = type(e).__name__
        except Exception as e:
            e.add_note(f"{name}, {how}")
            raise
        finally:
            shutil.rmtree(folder / "tampered")
        return Counter({"files": 1, happened: 1})

    return try_one


def use(loaded: Any) -> None:
    """Predict a batch with whatever was loaded; the logits must be finite, or it is refused."""
    live = _live(loaded)
    if live is None:
        return
    net = "mlp" if isinstance(live, LiveStream) else "resnet_bn"
    logits = live(make_batches(net)[0])
    assert logits.isfinite().all(), "NaN or infinity was predicted"
    live.state()
    live.reset()


def _live(loaded: Any) -> Method | LiveStream[Any] | None:
    match loaded:
        case Method() | LiveStream():
            return loaded
        case Adapter():
            net = make_net("resnet_bn")
            return Source(attach(net, loaded))
        case SourceModel():
            return Source(loaded.model)
        case _:
            return None


def _of_calibrations(folder: Path) -> dict[str, tuple[Path, Loader]]:
    """Facts that `recommended` is built from, and then predicts."""
    found = {}
    for net in CALIBRATED:
        calibration(net).save(folder / f"facts-{net}")
        found[f"facts-{net}"] = (folder / f"facts-{net}", partial(_recommended, net))
    return found


def _recommended(net: str, folder: Path) -> None:
    facts = Calibration.load(folder)
    live = twoshift.recommended(make_net(net), facts)
    for x in make_batches(net)[:2]:
        logits = live(x)
        assert logits.isfinite().all(), "NaN or infinity was predicted"
        assert logits.shape == (len(x), CLASSES)
    live.describe()


def _of_streams(folder: Path) -> dict[str, tuple[Path, Loader]]:
    """States that a stream of a running method goes on from; one that is refused changes none."""
    found: dict[str, tuple[Path, Loader]] = {}
    for name in ("tent", "rotta", "recommended"):
        live = build(name, "mlp", True)
        for x in make_batches("mlp")[:2]:
            live(x)
        live.save(folder / f"stream-{name}")
        found[f"stream-{name}"] = (folder / f"stream-{name}", partial(_resumed, live))
    return found


def _resumed(live: Method, folder: Path) -> LiveStream[Any]:
    stream = live.stream("camera")
    before = stream.state()
    try:
        stream.load(folder)
    except TwoshiftError:
        after = stream.state()
        assert before.keys() == after.keys()
        assert all(before[name].equal(after[name]) for name in before), "a refusal changed a state"
        raise
    return stream
