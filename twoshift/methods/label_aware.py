"""Any method + adapter + estimator: the label shift adapter at test time.

Park et al., "Label Shift Adapter for Test-Time Adaptation under Covariate and Label Shifts",
ICCV 2023: the head is conditioned on the estimate so far, the method predicts and adapts, and the
prediction moves the estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from twoshift.adapters import adapted_heads, condition
from twoshift.errors import HeadError, MismatchError
from twoshift.estimators import PriorEstimator
from twoshift.methods.base import Method, State

PREFIX = "estimator."


class LabelAware(Method):
    """Tells the adapter inside a method the label distribution that an estimator reads off.

    Args:
        method: A method around a model with an adapter attached. It is used, not copied.
        estimator: Follows the label distribution of the stream.
    """

    def __init__(self, method: Method, estimator: PriorEstimator) -> None:
        nn.Module.__init__(self)  # the model is the method's: no second copy
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
        """The label distribution believed in now."""
        return self.estimator.prior

    def adapt(self, x: Tensor) -> Tensor:
        """Condition, predict and adapt, then estimate."""
        self._condition()
        self.method.unadjusted = [] if self.estimator.reads_unadjusted else None
        logits = self.method.adapt(x)
        seen = self.method.unadjusted
        self.estimator.update((logits if seen is None else torch.cat(seen)).detach().softmax(1))
        return logits

    def settings(self) -> dict[str, Any]:
        """Those of the method; the estimator has its own."""
        return self.method.settings()

    def state(self) -> State:
        """The method's state and the estimator's."""
        return with_estimate(self.method.state(), self.estimator)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put a state back, bit for bit."""
        load_with_estimate(state, self.estimator, self.method.load_state)

    def origin(self) -> str:
        """The method's."""
        return self.method.origin()

    @torch.no_grad()
    def _condition(self) -> None:
        condition(self.method, self.estimator.prior.to(self.device))


def with_estimate(state: State, estimator: PriorEstimator) -> State:
    """A state and that of an estimator, in one dictionary."""
    return {**state, **{f"{PREFIX}{n}": t for n, t in estimator.state().items()}}


def load_with_estimate(
    state: Mapping[str, Tensor], estimator: PriorEstimator, load_rest: Callable[[State], None]
) -> None:
    """Put both back, or neither."""
    before = estimator.state()
    estimator.load_state(
        {n.removeprefix(PREFIX): t for n, t in state.items() if n.startswith(PREFIX)}
    )
    try:
        load_rest({n: t for n, t in state.items() if not n.startswith(PREFIX)})
    except MismatchError:
        estimator.load_state(before)
        raise
