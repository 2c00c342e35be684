"""The promises of the contract, one function each.

A check takes a `MethodCase` and raises an AssertionError that says which promise is broken, and
how. A check that cannot be made raises `unittest.SkipTest`, which pytest shows as a skipped test.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor

from twoshift.adapters import adapted_heads, attach
from twoshift.errors import BatchError, UnknownName
from twoshift.methods._streams import LiveStream
from twoshift.methods.base import Method, methods
from twoshift.models.head import class_count
from twoshift.testing._case import MethodCase
from twoshift.testing._compare import (
    different,
    require,
    require_same_logits,
    require_same_run,
    require_same_state,
    snapshot,
)


def check_logits(case: MethodCase) -> None:
    """Logits have a row per image, float32 or the model's type if wider, and no graph; finite."""
    classes, dtype = class_count(case.model), next(case.model.parameters()).dtype
    dtype = torch.promote_types(dtype, torch.float32)
    for x, logits in zip(case.batches, case.reference.logits, strict=True):
        shape = (len(x), classes)
        require(logits.shape == shape, f"logits must be {shape}, got {tuple(logits.shape)}")
        require(logits.dtype == dtype, f"logits must be {dtype}, got {logits.dtype}")
        require(bool(logits.isfinite().all()), "logits must be finite")
        require(not logits.requires_grad, "logits must be detached from the graph")
        require(not logits.is_inference(), "logits must not be inference tensors")


def check_batch_sizes(case: MethodCase) -> None:
    """Batches of one image and of an odd number of images are taken, also as the first batch."""
    live, classes = case.build(), class_count(case.model)
    images = torch.cat(list(case.batches))
    for size in (1, 3):
        logits = live(images[:size])
        ok = logits.shape == (size, classes) and bool(logits.isfinite().all())
        require(ok, f"a batch of {size} must give ({size}, {classes}) finite logits")


def check_memory_layout(case: MethodCase) -> None:
    """Images may be stored channels-last."""
    if any(x.dim() != 4 for x in case.batches):
        raise SkipTest("only images of shape (B, C, H, W) can be channels-last")
    live = case.build()
    logits = [live(x.contiguous(memory_format=torch.channels_last)) for x in case.batches]
    require(all(bool(x.isfinite().all()) for x in logits), "channels-last: logits must be finite")
    rounding = 16 * torch.finfo(next(case.model.parameters()).dtype).eps
    rtol, atol = max(1e-3, rounding), max(1e-4, rounding)
    close = torch.allclose(logits[0], case.reference.logits[0], rtol=rtol, atol=atol)
    require(close, "channels-last images must give the same prediction")


def check_given_model_untouched(case: MethodCase) -> None:
    """The given model keeps its weights, statistics, modes and gradients."""
    model = case.network().train()
    next(model.children(), model).eval()
    next(model.parameters()).requires_grad_(False)
    before = snapshot(model)
    live = case.build(model)
    case.run(live)
    live.reset()
    changed = different(snapshot(model), before)
    require(not changed, f"the given model must stay as it was, changed: {changed}")


def check_given_model_not_shared(case: MethodCase) -> None:
    """Later changes of the given model do not reach the method."""
    model = case.network()
    live = case.build(model)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.zero_()
    promise = "the method must own a copy of the model"
    require_same_logits([live(case.batches[0])], case.reference.logits[:1], promise)


def check_batch_untouched(case: MethodCase) -> None:
    """The caller's batch is not written to."""
    x = case.batches[0].clone()
    case.build()(x)
    require(torch.equal(x, case.batches[0]), "the batch must not be written to")


def check_no_gradient_reaches_the_caller(case: MethodCase) -> None:
    """A batch that is part of the caller's graph gets no gradient, and the graph stays usable."""
    x = case.batches[0].clone().requires_grad_()
    derived = x * 1
    live = case.build()
    promise = "a batch with a graph must give the same logits"
    require_same_logits([live(derived)], case.reference.logits[:1], promise)
    require(x.grad is None, "no gradient may reach the caller's batch")
    try:
        derived.sum().backward()
    except RuntimeError as e:
        raise AssertionError(f"the caller's graph must stay usable: {e}") from e


def check_reset(case: MethodCase) -> None:
    """`reset` goes back to the moment of construction, bit for bit."""
    live = case.build()
    require(hasattr(live, "_initial"), "the constructor must end with self.ready()")
    case.run(live)
    live.reset()
    require_same_state(live, case.reference.states[0], "reset must restore the state")
    require(all(p.grad is None for p in live.parameters()), "reset must drop all gradients")
    promise = "after reset, the stream must give the same logits again"
    require_same_logits(case.run(live), case.reference.logits, promise)
    promise = "after reset, the stream must lead to the same state again"
    require_same_state(live, case.reference.states[-1], promise)


def check_save_and_load(case: MethodCase) -> None:
    """A saved method that is loaded again goes on bit for bit, and can still be reset.

    Loading finds the class by its registered name. A class that is not registered is skipped.
    """
    try:
        methods.name_of(case.method)
    except UnknownName as e:
        raise SkipTest(
            f"{case.method.__name__} is not registered, so it cannot be saved: "
            'put @methods.register("name") above the class'
        ) from e
    live, (logits, states) = case.build(), case.reference
    for x in case.batches[:-1]:
        live(x.clone())
    with TemporaryDirectory() as folder:
        live.save(Path(folder) / "state")
        loaded = Method.load(Path(folder) / "state", case.network())
    require(type(loaded) is type(live), f"loading must give {type(live)}, got {type(loaded)}")
    require_same_state(loaded, states[-2], "a loaded method must have the saved state")
    last = loaded(case.batches[-1].clone())
    require_same_logits([last], logits[-1:], "a loaded method must go on where it was saved")
    require_same_state(loaded, states[-1], "a loaded method must adapt as the saved one")
    loaded.reset()
    first = loaded(case.batches[0].clone())
    require_same_logits([first], logits[:1], "reset after loading must go back to construction")


def check_adapter_stays(case: MethodCase) -> None:
    """The weights of an attached adapter never move. Skipped for a case without an adapter."""
    if case.adapter is None:
        raise SkipTest("the case has no adapter")
    ((_, expected),) = adapted_heads(attach(case.model, case.adapter))
    live = case.build()
    case.run(live)
    heads = [head for _, head in adapted_heads(live)]
    require(bool(heads), "the model inside the method must keep its adapter")
    for head in heads:
        changed = different(head.adapter.state_dict(), expected.adapter.state_dict())
        require(not changed, f"the adapter must never move, changed: {changed}")
        no_grad = all(p.grad is None for p in head.adapter.parameters())
        require(no_grad, "the adapter must get no gradients")


def check_no_grad_caller(case: MethodCase) -> None:
    """A caller under `torch.no_grad` gets the same run."""
    live = case.build()
    with torch.no_grad():
        logits = case.run(live)
    require_same_run(case, live, logits, "under torch.no_grad")


def check_inference_mode_caller(case: MethodCase) -> None:
    """A caller under `torch.inference_mode` gets the same run."""
    live = case.build()
    with torch.inference_mode():
        logits = case.run(live)
        require(torch.is_inference_mode_enabled(), "inference mode must stay on for the caller")
    require_same_run(case, live, logits, "under torch.inference_mode")


def check_built_in_inference_mode(case: MethodCase) -> None:
    """A method that is built under `torch.inference_mode` gives the same run."""
    try:
        with torch.inference_mode():
            live = case.build()
            logits = case.run(live)
    except (RuntimeError, BatchError) as e:
        cure = "make tensors that will be written to inside torch.inference_mode(False)"
        raise AssertionError(f"built under torch.inference_mode, it must run: {cure}; {e}") from e
    require_same_run(case, live, logits, "built under torch.inference_mode")


def check_runs_repeat(case: MethodCase) -> None:
    """Runs repeat whatever the global seed is, and leave the global generator alone."""
    with torch.random.fork_rng():
        torch.manual_seed(1)  # the reference has another one
        before = torch.get_rng_state()
        live = case.build()
        logits = case.run(live)
        drawn = not torch.equal(torch.get_rng_state(), before)
    cure = "take random numbers from self.generator"
    require(not drawn, f"the global random generator must not be used: {cure}")
    require_same_run(case, live, logits, "under another global seed")


def check_train_and_eval(case: MethodCase) -> None:
    """The caller's `train` and `eval` change nothing: the method sets its modes itself."""
    live, logits = case.build(), []
    for mode, x in zip((live.train, live.eval), case.batches, strict=False):
        require(mode() is live, "train and eval must return the method")
        logits.append(live(x.clone()))
    promise = "train and eval must change nothing"
    require_same_logits(logits, case.reference.logits[:2], promise)
    require_same_state(live, case.reference.states[2], promise)


def check_settings(case: MethodCase) -> None:
    """`settings` holds the arguments of the constructor, and builds the method again.

    Tensors and dictionaries of tensors are facts about the source model, which are saved as such;
    everything else must fit into JSON.
    """
    expected = list(inspect.signature(case.method).parameters)[1:]
    try:
        settings = case.build().settings()
    except AttributeError as e:
        stored = "every argument of the constructor must be stored under its name"
        raise AssertionError(f"{stored}: {e}") from e
    names = list(settings)
    require(names == expected, f"settings must hold {expected}, got {names}")
    plain = {name: value for name, value in settings.items() if not _is_fact(value)}
    try:
        settings |= json.loads(json.dumps(plain))
    except TypeError as e:
        raise AssertionError(f"settings must fit into JSON: {e}") from e
    rebuilt = case.build(**settings)
    changed = different(rebuilt.settings(), settings)
    require(not changed, f"settings must be stored as they are, changed: {changed}")
    require_same_run(case, rebuilt, case.run(rebuilt), "built of its own settings")


def check_refused_batch(case: MethodCase) -> None:
    """A batch that is refused, even after the method adapted to it, leaves no trace."""
    live, logits = case.build(), []
    for i, x in enumerate(case.batches):
        bad = [x * float("nan"), x[:0], *([x[:, :-1]] if x.dim() == 4 else [])]
        for batch in bad:
            _require_refusal(live, batch)
        if i == 1:
            live.adapt = _then_refuse(live.adapt)  # type: ignore[method-assign, assignment]
            _require_refusal(live, x.clone())
            del live.adapt  # the one of the class again
        promise = "a refused batch must leave the state as it was"
        require_same_state(live, case.reference.states[i], promise)
        logits.append(live(x.clone()))
    require_same_run(case, live, logits, "between refused batches")


def check_device(case: MethodCase) -> None:
    """Everything is on the device of the model."""
    live, device = case.build(), next(case.model.parameters()).device
    require(live.device == device, f"device must be {device}, got {live.device}")
    got = case.reference.logits[0].device
    require(got == device, f"logits must be on {device}, got {got}")
    tensors = itertools.chain(live.named_parameters(), live.named_buffers())
    elsewhere = [name for name, tensor in tensors if tensor.device != device]
    require(not elsewhere, f"the method must be on {device}, elsewhere: {elsewhere}")


def check_adapt_takes_images_only(case: MethodCase) -> None:
    """`adapt` takes the images and nothing else, so that labels cannot get in."""
    names = list(inspect.signature(case.method.adapt).parameters)
    require(names == ["self", "x"], f"adapt must take (self, x), takes {tuple(names)}")


def check_two_methods(case: MethodCase) -> None:
    """Two methods around one network do not feel each other."""
    model = case.network()
    first, second = case.build(model), case.build(model)
    logits = [first(case.batches[0].clone())]
    second(case.batches[-1].clone())
    logits.append(first(case.batches[1].clone()))
    promise = "a second method around the same network must change nothing"
    require_same_logits(logits, case.reference.logits[:2], promise)
    require_same_state(first, case.reference.states[2], promise)


def check_two_streams(case: MethodCase) -> None:
    """Two streams share one method, each with a state of its own, and do not feel each other."""
    live, logits = case.build(), []
    mine = other = live.state()
    for x, y in zip(case.batches[:2], case.batches[:-3:-1], strict=True):
        live.load_state(mine)
        logits.append(live(x.clone()))
        mine = live.state()
        live.load_state(other)
        live(y.clone())
        other = live.state()
    promise = "state and load_state must hold all that a stream depends on"
    require_same_logits(logits, case.reference.logits[:2], promise)
    live.load_state(mine)
    require_same_state(live, case.reference.states[2], promise)


def check_shared_network(case: MethodCase) -> None:
    """Streams over one network do not feel each other: each is as a method of its own."""
    live, alone = case.build(), case.build()
    there, back = live.stream("there"), live.stream("back")
    expected = [alone(x.clone()) for x in reversed(case.batches)]
    own, ours, theirs = [], [], []
    for x, y in zip(case.batches, reversed(case.batches), strict=True):
        ours.append(there(x.clone()))
        _require_refusal(there, y * float("nan"))
        theirs.append(back(y.clone()))
        own.append(live(x.clone()))
    promise = "streams over one network must not feel each other"
    require_same_logits(theirs, expected, promise)
    require_same_state(back, alone.state(), promise)
    for stream, logits in ((there, ours), (live, own)):
        require_same_logits(logits, case.reference.logits, promise)
        require_same_state(stream, case.reference.states[-1], promise)


def _is_fact(setting: object) -> bool:
    values = setting.values() if isinstance(setting, Mapping) else [setting]
    return bool(values) and all(isinstance(value, Tensor) for value in values)


def _then_refuse(adapt: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    def refuse(x: Tensor) -> object:
        adapt(x)
        raise BatchError("refused after adapting")

    return refuse


def _require_refusal(live: Method | LiveStream[Any], batch: Tensor) -> None:
    try:
        live(batch)
    except BatchError:
        return
    raise AssertionError(f"a bad batch of shape {tuple(batch.shape)} must raise a BatchError")
