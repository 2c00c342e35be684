"""Any method with an adapter and an estimator of the label distribution.

Park et al., "Label Shift Adapter for Test-Time Adaptation under Covariate and Label Shifts",
ICCV 2023: the head is conditioned on the estimate so far, the method predicts and adapts, and the
prediction moves the estimate. With a logit adapter, this is logit adjustment at test time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from twoshift.adapters import Scores, adapted_heads, adapters, condition
from twoshift.errors import HeadError, MismatchError
from twoshift.estimators import PriorEstimator, estimators
from twoshift.methods._inputs import Inputs
from twoshift.methods._state import State
from twoshift.methods.base import Method

PREFIX = "estimator."


class LabelAware(Method):
    """Conditions the adapter of a method's model on an estimate of the label distribution.

    Args:
        method: A method around a model with an adapter attached. It is not copied.
        estimator: Estimates the label distribution of the stream.
    """

    def __init__(self, method: Method, estimator: PriorEstimator) -> None:
        nn.Module.__init__(self)  # no second copy of the method's model
        heads = [head for _, head in adapted_heads(method)]
        if not heads:
            raise HeadError(
                "the method's model has no adapter",
                cure="attach(model, adapter) before building the method.",
            )
        classes = heads[0].adapter.classes
        if estimator.classes != classes:
            raise MismatchError(
                "the estimator", must_be=f"for {classes} classes", got=estimator.classes
            )
        self.method, self.estimator = method, estimator
        self.statistics = method.statistics
        self._streams, self._named = method._streams, {}
        self._streams.join(estimator)
        with self._using():
            self._condition()
            self._initial = self._take_state()

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        """The model of the method."""
        return self.method.model

    @property
    def prior(self) -> Tensor:
        """The current estimate of the label distribution."""
        with self._using():
            return self.estimator.prior

    @property
    def inputs(self) -> Inputs | None:  # type: ignore[override]
        """What is known about the images."""
        return self.method.inputs

    def expect(self, inputs: Inputs) -> Self:
        """Refuse batches that are not like ``inputs`` from now on."""
        self.method.expect(inputs)
        return self

    def adapt(self, x: Tensor) -> Scores:
        """Condition, predict and adapt, then estimate."""
        self._condition()
        scores = self.method.adapt(x)
        logits = scores.raw if self.estimator.reads_unadjusted else scores.logits
        self.estimator.update(logits.detach().softmax(1))
        return scores

    def describe(self) -> str:
        """What is done to predictions, and why, in a line."""
        adapter = next(head.adapter for _, head in adapted_heads(self.method))
        names = (adapters.name_of(type(adapter)), estimators.name_of(type(self.estimator)))
        parts = f"{self.method.title}, adapter {names[0]}, estimator {names[1]}"
        return f"{parts}: {self.because}" if self.because else parts

    def settings(self) -> dict[str, Any]:
        """The settings of the method; the estimator has its own."""
        return self.method.settings()

    @property
    def _core(self) -> Method:
        return self.method._core

    def _take_state(self) -> State:
        estimate = {f"{PREFIX}{n}": t for n, t in self.estimator.state().items()}
        return {**self.method._take_state(), **estimate}

    def _fit_state(self, state: Mapping[str, Tensor], quiet: bool = False) -> State:
        estimate, rest = _apart(state)
        self.estimator.check_state(estimate)
        fit = self.method._fit_state(rest, quiet)
        return {**fit, **{f"{PREFIX}{n}": t.clone() for n, t in estimate.items()}}

    def _put_state(self, state: Mapping[str, Tensor]) -> None:
        estimate, rest = _apart(state)
        self.method._put_state(rest)
        self.estimator.hold(estimate)

    def origin(self) -> str:
        """Fingerprint of the model that the method was given."""
        return self.method.origin()

    def _given(self) -> State:
        return self.method._given()

    @torch.no_grad()
    def _condition(self) -> None:
        condition(self.method, self.estimator.prior.to(self.device))


def _apart(state: Mapping[str, Tensor]) -> tuple[State, State]:
    """The estimator's part of a state, and the method's."""
    if not isinstance(state, Mapping):
        return {}, state  # to be refused by the method
    names = {n for n in state if isinstance(n, str) and n.startswith(PREFIX)}
    estimate = {n.removeprefix(PREFIX): state[n] for n in names}
    return estimate, {n: t for n, t in state.items() if n not in names}
