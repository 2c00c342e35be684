"""Any method with an adapter and an estimator of the label distribution.

Park et al., "Label Shift Adapter for Test-Time Adaptation under Covariate and Label Shifts",
ICCV 2023: the head is conditioned on the estimate so far, the method predicts and adapts, and the
prediction moves the estimate. With a logit adapter, this is logit adjustment at test time. An
estimator that counts the batch at hand, such as `Paced`, adjusts that very batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from twoshift.accuracy import Expected, ExpectedAccuracy
from twoshift.adapters import Scores, adapted_heads, adapters, rescore
from twoshift.errors import HeadError, MismatchError
from twoshift.estimators import PriorEstimator, estimators
from twoshift.methods._inputs import Inputs
from twoshift.methods._state import State
from twoshift.methods.base import Method

PREFIX, ACCURACY = "estimator.", "accuracy."  # of names in a state
PART = 64  # images whose accuracy is told at once


class LabelAware(Method):
    """Conditions the adapter of a method's model on an estimate of the label distribution.

    Args:
        method: A method around a model with an adapter attached. It is not copied.
        estimator: Estimates the label distribution of the stream.
        accuracy_judge: The fact that tells how often predictions are right, fitted by a
            calibration; see `ExpectedAccuracy`.
    """

    def __init__(
        self, method: Method, estimator: PriorEstimator, accuracy_judge: Tensor | None = None
    ) -> None:
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
        self._heads = heads  # finding them takes as long as predicting an image
        self.statistics = method.statistics
        self._streams, self._named = method._streams, {}
        self._streams.join(estimator)
        self.accuracy: ExpectedAccuracy | None = None
        if accuracy_judge is not None:
            self.accuracy = ExpectedAccuracy(classes, accuracy_judge)
            self._streams.join(self.accuracy)
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
    def prior_ahead(self) -> Tensor:
        """The label distribution by which to adjust images to come, if they are not counted."""
        with self._using():
            self.estimator.view = self.view_in_use
            return self.estimator.ahead

    @property
    def expected_accuracy(self) -> Expected | None:
        """How often the last predictions are expected to be right, told without labels.

        None before the first batch, and where no calibration has fitted that.
        """
        with self._using():
            return None if self.accuracy is None else self.accuracy.read()

    @property
    def view_in_use(self) -> int:
        """Which statistics predict, as the method says."""
        return self.method.view_in_use

    @property
    def inputs(self) -> Inputs | None:  # type: ignore[override]
        """What is known about the images."""
        return self.method.inputs

    def expect(self, inputs: Inputs) -> Self:
        """Refuse batches that are not like ``inputs`` from now on."""
        self.method.expect(inputs)
        return self

    def adapt(self, x: Tensor) -> Scores:
        """Condition, predict and adapt, then estimate; and predict by that if it counts now."""
        part = self.estimator.part
        if part is None or part != self.method.part:
            return self._adapt(x)
        # both in step: the statistics of a part are those of its labels
        parts = [self._adapt(images) for images in x.split(part)]
        return parts[0] if len(parts) == 1 else Scores.cat(parts)

    def _adapt(self, x: Tensor) -> Scores:
        self._condition()
        scores = self.method.adapt(x)
        self.estimator.view = view = self.view_in_use
        parts = [self._estimated(part) for part in scores.split(self.estimator.part or len(x))]
        scores = parts[0] if len(parts) == 1 else Scores.cat(parts)
        if self.accuracy is not None:
            for part in scores.logits.detach().softmax(1).split(PART):
                self.accuracy.update(part, view)
        return scores

    def _estimated(self, scores: Scores) -> Scores:
        """Estimate the labels of these images, and score them by that if it counts now."""
        logits = scores.raw if self.estimator.reads_unadjusted else scores.logits
        self.estimator.update(logits.detach().softmax(1))
        if not self.estimator.counts_batch:
            return scores
        self._condition()
        return rescore(self.model, scores)

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
        estimates = {
            f"{prefix}{name}": tensor
            for prefix, part in self._followers().items()
            for name, tensor in part.state().items()
        }
        return {**self.method._take_state(), **estimates}

    def _fit_state(self, state: Mapping[str, Tensor], quiet: bool = False) -> State:
        rest, fit = state, State()
        for prefix, part in self._followers().items():
            own, rest = _apart(rest, prefix)
            part.check_state(own)
            fit |= {f"{prefix}{n}": t.clone() for n, t in own.items()}
        return {**self.method._fit_state(rest, quiet), **fit}

    def _put_state(self, state: Mapping[str, Tensor]) -> None:
        rest = state
        for prefix, part in self._followers().items():
            own, rest = _apart(rest, prefix)
            part.hold(own)
        self.method._put_state(rest)

    def _followers(self) -> dict[str, PriorEstimator | ExpectedAccuracy]:
        """What follows the predictions, by the prefix of its names in a state."""
        if self.accuracy is None:
            return {PREFIX: self.estimator}
        return {PREFIX: self.estimator, ACCURACY: self.accuracy}

    def origin(self) -> str:
        """Fingerprint of the model that the method was given."""
        return self.method.origin()

    def _given(self) -> State:
        return self.method._given()

    @torch.no_grad()
    def _condition(self) -> None:
        prior = self.estimator.present
        for head in self._heads:
            head.prior.copy_(prior)


def _apart(state: Mapping[str, Tensor], prefix: str) -> tuple[State, State]:
    """The part of a state whose names have a prefix, without it; and the rest."""
    if not isinstance(state, Mapping):
        return {}, state  # to be refused by the method
    names = {n for n in state if isinstance(n, str) and n.startswith(prefix)}
    own = {n.removeprefix(prefix): state[n] for n in names}
    return own, {n: t for n, t in state.items() if n not in names}
