"""Run the contract: every check on every case of a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import SkipTest

from torch import Tensor, nn

from twoshift.adapters import Adapter
from twoshift.errors import InputError, ModelError
from twoshift.methods.base import Method
from twoshift.testing import checks
from twoshift.testing._case import MethodCase
from twoshift.testing.networks import (
    NETWORKS,
    SHAPE,
    SHAPES,
    make_adapter,
    make_batches,
    make_network,
)

Check = Callable[[MethodCase], None]


class CheckResult(NamedTuple):
    """The outcome of one check on one case that did not fail.

    Attributes:
        check: Name of the check.
        case: Name of the case.
        skipped: Why the check could not be made, or None if it passed.
    """

    check: str
    case: str
    skipped: str | None


def method_checks() -> list[Check]:
    """All checks of the contract, in order. Each is called with a `MethodCase`."""
    return [check for name, check in vars(checks).items() if name.startswith("check_")]


def method_cases(
    cls: type[Method],
    model: nn.Module | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    adapter: Adapter | None = None,
    batches: Sequence[Tensor] | None = None,
) -> list[MethodCase]:
    """The cases that `check_method` tries, each without and with an adapter.

    Args:
        cls: The class of the method.
        model: The classifier; by default every network in `NETWORKS` that the method accepts. A
            method refuses a network with a `ModelError`.
        settings: Arguments of the method's constructor, besides the model.
        adapter: An adapter for ``model``; by default one with random weights.
        batches: The stream, at least three batches; by default images of 3 x 16 x 16 pixels.
    """
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise InputError("cls", must_be="a subclass of twoshift.Method", got=repr(cls))
    names = list(NETWORKS) if model is None else [type(model).__name__]
    cases, refusals = [], []
    for name in names:
        network = make_network(name) if model is None else model
        stream = make_batches(SHAPES.get(name, SHAPE)) if batches is None else batches
        plain = MethodCase(cls, network, settings or {}, None, stream, f"{name}-plain")
        try:
            plain.build()
        except ModelError as e:
            refusals.append(f"{name}: {e}")
            continue
        attached = make_adapter(network) if adapter is None else adapter
        adapted = MethodCase(cls, network, settings or {}, attached, stream, f"{name}-adapter")
        cases += [plain, adapted]
    if not cases:
        raise AssertionError("\n".join([f"{cls.__name__} accepts no network:", *refusals]))
    return cases


def check_method(
    cls: type[Method],
    model: nn.Module | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    adapter: Adapter | None = None,
    batches: Sequence[Tensor] | None = None,
) -> list[CheckResult]:
    """Check that a method keeps every promise of the contract; takes some seconds.

    A method that is not registered cannot be saved: `check_save_and_load` is then skipped, and
    the result says so.

    Args:
        cls: The class of the method.
        model: The classifier; by default every network in `NETWORKS` that the method accepts.
        settings: Arguments of the method's constructor, besides the model.
        adapter: An adapter for ``model``; by default one with random weights.
        batches: The stream, at least three batches; by default images of 3 x 16 x 16 pixels.

    Returns:
        One result for every check on every case.

    Raises:
        AssertionError: With every broken promise, by check and case.
    """
    cases = method_cases(cls, model, settings=settings, adapter=adapter, batches=batches)
    results, failures = [], []
    for case in cases:
        for check in method_checks():
            skipped = None
            try:
                check(case)
            except SkipTest as e:
                skipped = str(e)
            except Exception as e:
                reason = str(e) if isinstance(e, AssertionError) else f"{type(e).__name__}: {e}"
                failures.append((f"{check.__name__} [{case}]: {reason}", e))
            results.append(CheckResult(check.__name__, str(case), skipped))
    if failures:
        broken = "\n".join(f"  {message}" for message, _ in failures)
        raise AssertionError(f"{cls.__name__} breaks its contract:\n{broken}") from failures[0][1]
    return results
