"""Bad batches between good ones: each is refused, and nothing is felt of it later.

A case is a whole stream of one method on one network, with bad batches before every good one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import twoshift
from tests.fuzz.workers import Case
from tests.methods.cases import INCOMPATIBLE
from tests.toys import CLASSES, SHAPES, make_batches, make_method, make_net
from twoshift.errors import TwoshiftError
from twoshift.methods import Inputs, Method, methods
from twoshift.testing import NETWORKS, same

BEFORE_EACH = 20  # bad batches before every good one
Make = Callable[[Tensor, random.Random], Any]


class Strange(Tensor):
    """A subclass that does something of its own in every operation."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise KeyError(f"no {func}")


def _put(value: float) -> Make:
    def make(x: Tensor, rng: random.Random) -> Tensor:
        x = x.clone()
        x.view(-1)[rng.randrange(x.numel())] = value  # one pixel is enough
        return x

    return make


def _fake(x: Tensor, rng: random.Random) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(x)


def _freed(x: Tensor, rng: random.Random) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(rng.choice([0, 4, x.numel() * 4 - 1]))
    return x


def _quantised(x: Tensor, rng: random.Random) -> Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, rng.choice([torch.quint8, torch.qint8]))


def _sparse(x: Tensor, rng: random.Random) -> Tensor:
    # only two dimensions can be compressed
    layouts: list[Callable[[], Tensor]] = [x.to_sparse, x.flatten(1).to_sparse_csr]
    return rng.choice(layouts)()


def _nested(x: Tensor, rng: random.Random) -> Tensor:
    layout = rng.choice([torch.strided, torch.jagged])
    rows = [row.flatten()[: rng.randint(1, 99)] for row in x]
    return torch.nested.nested_tensor(rows, layout=layout)


def _masked(x: Tensor, rng: random.Random) -> Any:
    return torch.masked.masked_tensor(x, x > 0.3)


def _dtype(x: Tensor, rng: random.Random) -> Tensor:
    names = "uint8 int8 int16 int32 int64 bool float64 float16 bfloat16 complex64 complex128 "
    names += "float8_e4m3fn float8_e5m2 uint16 uint32 uint64"
    return x.to(getattr(torch, rng.choice(names.split())))


# refused whatever the method and the network
BAD: dict[str, Make] = {
    "None": lambda x, rng: None,
    "a list": lambda x, rng: x.tolist(),
    "a tuple": lambda x, rng: (x,),
    "a dictionary": lambda x, rng: {"images": x},
    "an array": lambda x, rng: np.asarray(x),
    "text": lambda x, rng: "images",
    "a number": lambda x, rng: 3.0,
    "a generator": lambda x, rng: (row for row in x),
    "a class": lambda x, rng: Tensor,
    "another type": _dtype,
    "no images": lambda x, rng: x[:0],
    "no pixels": lambda x, rng: x[..., :0],
    "no channels": lambda x, rng: x[:, :0],
    "a scalar": lambda x, rng: x.mean(),
    "a row": lambda x, rng: x.flatten(),
    "nothing": lambda x, rng: torch.empty(0),
    "NaN": _put(float("nan")),
    "inf": _put(float("inf")),
    "-inf": _put(float("-inf")),
    "all NaN": lambda x, rng: torch.full_like(x, float("nan")),
    "meta": lambda x, rng: x.to("meta"),
    "sparse": _sparse,
    "mkldnn": lambda x, rng: x.to_mkldnn(),
    "quantised": _quantised,
    "nested": _nested,
    "masked": _masked,
    "fake": _fake,
    "freed": _freed,
    "uninitialised": lambda x, rng: nn.parameter.UninitializedParameter(),
    "an uninitialised buffer": lambda x, rng: nn.parameter.UninitializedBuffer(),
    "a subclass": lambda x, rng: x.as_subclass(Strange),
    "conjugate": lambda x, rng: torch.complex(x, x).conj(),
}


def _resized(x: Tensor, rng: random.Random) -> Tensor:
    return torch.rand(len(x), x.shape[1], *(rng.choice([1, 2, 3, 7, 15, 17, 33]) for _ in "HW"))


def _other_channels(x: Tensor, rng: random.Random) -> Tensor:
    return torch.rand(len(x), rng.choice([1, 2, 4, 12, 64]), *x.shape[2:])


def _scaled(x: Tensor, rng: random.Random) -> Tensor:
    return x * rng.choice([-1.0, 1e2, 255.0, 1e4, 1e10, -1e20, 1e30, 3e38])


def _rank(x: Tensor, rng: random.Random) -> Tensor:
    ways: list[Callable[[], Tensor]] = [
        lambda: x[0], lambda: x[0, 0], lambda: x[None], lambda: x[..., None],
        lambda: x.flatten(1), lambda: x.flatten(2), lambda: x.flatten(0, 1),
        lambda: x.reshape(len(x), *[1] * rng.choice([5, 20, 60]), *x.shape[1:]),
    ]  # fmt: skip
    return rng.choice(ways)()


def _turned(x: Tensor, rng: random.Random) -> Tensor:
    return x.permute(*rng.sample(range(4), 4))


# refused or taken, as the network is; what is taken gives finite logits
DOUBTFUL: dict[str, Make] = {
    "another size": _resized,
    "other channels": _other_channels,
    "far out of range": _scaled,
    "another rank": _rank,
    "turned": _turned,
    "one image many times": lambda x, rng: x[:1].expand(rng.choice([2, 9, 64]), -1, -1, -1),
    "one pixel many times": lambda x, rng: x[:1, :1, :1, :1].expand_as(x),
    "constant": lambda x, rng: torch.full_like(x, rng.choice([0.0, -0.0, 1.0, 1e-45, 0.5])),
    "a single image": lambda x, rng: x[:1],
}


def _overlapping(x: Tensor, rng: random.Random) -> Tensor:
    flat = torch.cat([x.flatten(), x.flatten()])
    return flat.as_strided(x.shape, (1, 1, 1, 1), rng.randrange(9))


def _inference(x: Tensor, rng: random.Random) -> Tensor:
    with torch.inference_mode():
        return x.clone()


# ordinary images that are stored in another way; taken by every method
UNUSUAL: dict[str, Make] = {
    "requires gradients": lambda x, rng: x.clone().requires_grad_(),
    "part of a graph": lambda x, rng: x.clone().requires_grad_() * 1,
    "a parameter": lambda x, rng: nn.Parameter(x.clone()),
    "channels last": lambda x, rng: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x, rng: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second": lambda x, rng: x.repeat_interleave(2, 3)[..., ::2],
    "overlapping": _overlapping,
    "inference": _inference,
    "read only": lambda x, rng: torch.from_numpy(np.array(x)),
    "negated view": lambda x, rng: torch.complex(x, -x).conj().imag,
    "shared": lambda x, rng: x.clone().share_memory_(),
}

MODES: list[Callable[[], AbstractContextManager[Any]]] = [
    *[nullcontext] * 4, torch.no_grad, torch.inference_mode, torch.enable_grad,
    partial(torch.autograd.set_detect_anomaly, True),
]  # fmt: skip


def build(method: str, net: str, adapted: bool) -> Method:
    """A method of the suite; ``"recommended"`` has facts of a calibration."""
    if method != "recommended":
        return make_method(method, make_net(net), adapted)
    return twoshift.recommended(make_net(net), calibration(net))


@cache
def calibration(net: str) -> twoshift.Calibration:
    """Facts of a network of the toys, from random images and labels."""
    g = torch.Generator().manual_seed(5)
    images = make_batches(net, sizes=(40, 40), seed=4)
    batches = [(x, torch.randint(CLASSES, (len(x),), generator=g)) for x in images]
    return twoshift.calibrate(make_net(net), batches, held_out=batches, source_prior="training")


def configurations() -> list[tuple[str, str, bool]]:
    """Every method on every network that it takes, without and with adapter and estimate."""
    named = [
        (method, net, adapted)
        for method in methods
        for net in NETWORKS
        for adapted in (False, True)
        if (method, net) not in INCOMPATIBLE
    ]
    return [*named, *(("recommended", net, True) for net in NETWORKS)]


@cache
def reference(method: str, net: str, adapted: bool) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Logits and states of a stream of good batches only."""
    live, logits, states = build(method, net, adapted), [], []
    for x in make_batches(net):
        logits.append(live(x.clone()))
        states.append(live.state())
    return logits, states


def prepare(folder: Path) -> Case:
    """See `tests.fuzz.workers`."""
    known = configurations()

    def try_one(rng: random.Random, case: int) -> Counter[str]:
        return stream(*known[case * 29 % len(known)], rng)  # neighbours are of all kinds

    return try_one


def stream(method: str, net: str, adapted: bool, rng: random.Random) -> Counter[str]:
    """One stream with bad batches in it; what is wrong is an AssertionError."""
    live, happened = build(method, net, adapted), Counter[str]()
    logits, states = reference(method, net, adapted)
    where = f"{method} on {net}{' with an adapter' if adapted else ''}"
    for x, expected, after in zip(make_batches(net), logits, states, strict=True):
        for _ in range(BEFORE_EACH):
            kinds = rng.choice([BAD, BAD, BAD, DOUBTFUL, UNUSUAL])
            kind = rng.choice(sorted(kinds))
            what = f"{where}: {kind}"
            before, bad = live.state(), kinds[kind](x, rng)
            given = _given(live, bad, rng.choice(MODES))
            if isinstance(given, TwoshiftError):
                assert kinds is not UNUSUAL, f"{what} was refused: {given}"
                assert same(live.state(), before), f"{what} was refused, but changed the state"
                happened[type(given).__name__] += 1
            else:
                assert kinds is not BAD, f"{what} was taken"
                assert given.isfinite().all(), f"{what} was taken, with NaN or infinity"
                if kinds is UNUSUAL and kind != "overlapping":
                    close = torch.allclose(given, expected, rtol=1e-2, atol=1e-2)
                    assert close, f"{what} was predicted differently"
                live.load_state(before)
                assert same(live.state(), before), f"{what}: the state did not come back"
                happened["taken"] += 1
            happened["batches"] += 1
        assert torch.equal(live(x.clone()), expected), f"{where}: later predictions differ"
        assert same(live.state(), after), f"{where}: the later state differs"
    if live_inputs(live):
        happened.update(_outside_of_facts(live, net, where))
    happened["streams"] += 1
    return happened


def _given(
    live: Method, batch: Any, mode: Callable[[], AbstractContextManager[Any]]
) -> Tensor | TwoshiftError:
    try:
        with mode():
            logits: Tensor = live(batch)
            return logits
    except TwoshiftError as e:
        return e


def live_inputs(live: Method) -> Inputs | None:
    """What is known of the images."""
    return getattr(live, "method", live).inputs


def _outside_of_facts(live: Method, net: str, where: str) -> Counter[str]:
    """Where the facts of the images are known, other ranges and sizes are refused."""
    channels, height, width = SHAPES.get(net, (3, 16, 16))
    good = torch.rand(4, channels, height, width)
    happened, before = Counter[str](), live.state()
    for bad in (good * 255, good - 9, torch.rand(4, channels, height + 1, width), 1e9 * good):
        try:
            live(bad)
        except TwoshiftError as e:
            happened[type(e).__name__] += 1
        else:
            raise AssertionError(f"{where}: {tuple(bad.shape)}, up to {bad.max():g}, was taken")
        assert same(live.state(), before)
        happened["batches"] += 1
    return happened
