"""Any method with an adapter and an estimator of the label distribution.

Park et al., "Label Shift Adapter for Test-Time Adaptation under Covariate and Label Shifts",
ICCV 2023: the head is conditioned on the estimate so far, the method predicts and adapts, and the
prediction moves the estimate. With a logit adapter, this is logit adjustment at test time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from twoshift.adapters import Scores, adapted_heads, condition
from twoshift.errors import HeadError, MismatchError
from twoshift.estimators import PriorEstimator
from twoshift.methods.base import Method, State

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
        self._condition()
        self.ready()

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        """The model of the method."""
        return self.method.model

    @property
    def prior(self) -> Tensor:
        """The current estimate of the label distribution."""
        return self.estimator.prior

    def adapt(self, x: Tensor) -> Scores:
        """Condition, predict and adapt, then estimate."""
        self._condition()
        scores = self.method.adapt(x)
        logits = scores.raw if self.estimator.reads_unadjusted else scores.logits
        self.estimator.update(logits.detach().softmax(1))
        return scores

    def settings(self) -> dict[str, Any]:
        """The settings of the method; the estimator has its own."""
        return self.method.settings()

    def state(self) -> State:
        """The method's state and the estimator's."""
        estimate = {f"{PREFIX}{n}": t for n, t in self.estimator.state().items()}
        return {**self.method.state(), **estimate}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state, bit for bit: the method's and the estimator's, or neither."""
        before = self.estimator.state()
        self.estimator.load_state(
            {n.removeprefix(PREFIX): t for n, t in state.items() if n.startswith(PREFIX)}
        )
        try:
            self.method.load_state({n: t for n, t in state.items() if not n.startswith(PREFIX)})
        except MismatchError:
            self.estimator.load_state(before)
            raise

    def origin(self) -> str:
        """Fingerprint of the model that the method was given."""
        return self.method.origin()

    @torch.no_grad()
    def _condition(self) -> None:
        condition(self.method, self.estimator.prior.to(self.device))
