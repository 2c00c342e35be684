"""The base class of estimators of the label distribution, and their registry."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from twoshift.errors import BatchError, MismatchError
from twoshift.registry import Registry, check_numbers, parameters_of
from twoshift.tensors import PLAIN, oddity

State = dict[str, Tensor]


class PriorEstimator(ABC):
    """Follows the label distribution of a stream from the probabilities predicted on it.

    A subclass defines the first state, how a batch changes a state and how the label distribution
    is read from it; its constructor stores each argument under the argument's name and ends with
    ``reset()``.

    Attributes:
        classes: Number of classes.
        prior: The current estimate, float32 (classes,), on the device of the last batch.
        present: The label distribution by which to adjust predictions now; the same as ``prior``
            unless the estimator tells the last batch from the stream.
        view: Which statistics the probabilities come from, for an estimator that reads several;
            set it before `update`. It is no part of the state.
        is_oracle: Whether it is given what no deployed model knows; results say so.
        reads_unadjusted: Whether it reads the predictions of the original head. Those of the
            adapter would feed the estimate back into itself.
        counts_batch: Whether ``present`` is meant for the batch just taken in, not the next one.
        part: Images of a large batch to take in at once; None for all.
    """

    is_oracle: ClassVar[bool] = False
    reads_unadjusted: ClassVar[bool] = False
    counts_batch: ClassVar[bool] = False
    part: ClassVar[int | None] = None
    view: int = 0
    prior: Tensor
    present: Tensor

    def __init__(self, classes: int) -> None:
        check_numbers("the estimator", "at least 1", classes=classes)
        self.classes = classes

    @abstractmethod
    def start(self) -> State:
        """The state before the first batch, on the CPU."""

    @abstractmethod
    def step(self, state: State, probs: Tensor) -> State:
        """The state after a batch; ``state`` itself stays as it is."""

    @abstractmethod
    def read(self, state: State) -> Tensor:
        """The label distribution of a state."""

    def read_present(self, state: State) -> Tensor:
        """The label distribution by which to adjust, of a state."""
        return self.read(state)

    @property
    def ahead(self) -> Tensor:
        """The label distribution by which to adjust images to come, if they are not counted."""
        return self.present.clone()

    def update(self, probs: Tensor) -> None:
        """Take in the predicted probabilities (B, classes) of a batch."""
        # a caller's inference tensors could not be saved for a later backward
        with torch.inference_mode(False), torch.no_grad():
            probs = check_probs(probs, self.classes).to(torch.float32, copy=True)
            state = {k: v.to(probs.device) for k, v in self._state.items()}
            self.hold(self.step(state, probs))

    def reset(self) -> None:
        """Forget every batch."""
        with torch.inference_mode(False), torch.no_grad():
            self.hold(self.start())

    def state(self) -> State:
        """A copy of everything that batches change."""
        return {k: v.clone() for k, v in self._state.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state, bit for bit; one that does not fit changes nothing."""
        self.check_state(state)
        with torch.inference_mode(False), torch.no_grad():
            self.hold({k: v.detach().clone() for k, v in state.items()})

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse a state that is not this estimator's, by a MismatchError."""
        owner = f"state of {type(self).__name__}"
        if not isinstance(state, Mapping):
            must_be = "a dictionary of tensors by name"
            raise MismatchError(owner, must_be=must_be, got=type(state).__name__)
        for name, tensor in state.items():
            if odd := oddity(tensor):
                raise MismatchError(f"{owner}, {name}", must_be=PLAIN, got=odd)
        expected, got = _describe(self._state), _describe(state)
        if expected != got:
            raise MismatchError(owner, must_be=expected, got=got)
        if not all(bool(v.isfinite().all()) for v in state.values()):
            raise MismatchError(owner, must_be="finite")
        if problem := self.problem(dict(state)):
            raise MismatchError(owner, must_be=problem)
        with torch.inference_mode(False), torch.no_grad():
            prior = self.read(dict(state))
        if not ((prior >= 0).all() and abs(float(prior.sum()) - 1) < 1e-2):  # also for NaN
            raise MismatchError(owner, must_be="one of a label distribution")

    def problem(self, state: State) -> str | None:
        """What a state of the right shapes must be besides finite, if it is not; else None."""
        return None

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments: ``create(name, **settings)`` builds it again."""
        return {name: getattr(self, name) for name in parameters_of(type(self))}

    def hold(self, state: State) -> None:
        """Take over a state that is known to fit."""
        self._state = state
        self.prior, self.present = self.read(state), self.read_present(state)


def check_probs(probs: Tensor, classes: int) -> Tensor:
    """Return ``probs``, or say why they are not one distribution per row."""
    if odd := oddity(probs):
        raise BatchError("predicted probabilities", must_be=PLAIN, got=odd)
    if probs.ndim != 2 or probs.shape[1] != classes or not len(probs):
        raise BatchError(
            "predicted probabilities", must_be=f"(B, {classes})", got=tuple(probs.shape)
        )
    if not probs.is_floating_point():
        raise BatchError("predicted probabilities", must_be="floating point", got=probs.dtype)
    low, high = (float(limit) for limit in probs.aminmax())  # both NaN if any is
    if not (math.isfinite(low) and math.isfinite(high)):
        raise BatchError("predicted probabilities", must_be="finite", got="NaN or infinity")
    # wide enough for half precision, far too narrow for logits
    if low < 0 or float((probs.float().sum(1) - 1).abs().max()) > 1e-2:
        raise BatchError(
            "predicted probabilities",
            must_be="non-negative, each row with sum 1",
            cure="Pass logits.softmax(1).",
        )
    return probs


def _describe(state: Mapping[str, Tensor]) -> dict[str, str]:
    names = sorted(state, key=str)
    return {k: f"{state[k].dtype} {tuple(state[k].shape)}" for k in names}


estimators: Registry[type[PriorEstimator]] = Registry("estimator", "twoshift.estimators")
