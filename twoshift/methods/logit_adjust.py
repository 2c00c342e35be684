"""Logit adjustment: add the logarithm of the label distribution, beside an entropy step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twoshift import estimators
from twoshift.adapters import adapted_heads
from twoshift.errors import ModelError, PriorError, SettingError
from twoshift.methods.base import Method, State, entropy, methods, paths
from twoshift.methods.label_aware import load_with_estimate, with_estimate
from twoshift.methods.one_step import OneStep
from twoshift.models.head import class_count
from twoshift.priors import check_prior

FLOOR = 1e-6  # of a class's share: an estimate of zero must not be final
# how the source was trained: whether its label distribution is still in the logits
STRATEGIES = {
    "balanced_softmax": False,
    "balanced_sampling": False,
    "classifier_retraining": False,
    "cross_entropy": True,
}


@methods.register("logit_adjust")
class LogitAdjust(OneStep):
    """Post-hoc logit adjustment by an estimated or a given label distribution.

    The adjusted logits are scored, and an entropy step is taken on them: with IABN layers by
    running statistics, otherwise by the batch's own. The estimate is the one before the batch,
    which then moves it.

    Args:
        model: The classifier, without an adapter: that would correct twice.
        source_prior: The label distribution of the source.
        strategy: How the source was trained. ``"balanced_softmax"``, ``"balanced_sampling"`` and
            ``"classifier_retraining"`` leave no label distribution in the logits;
            ``"cross_entropy"`` leaves the source's, which is taken out.
        estimator: Name of the estimator that follows the label distribution.
        estimator_settings: Its settings.
        prior: The label distribution of the stream, where it is known; nothing is estimated then.
        lr: Learning rate.
        optim: ``"adam"`` or ``"sgd"``.
        momentum: Weight of a batch in the running statistics of IABN layers.
        freeze: Paths of modules whose weights stay, for example ``["layer4"]``.
        step: Whether to take the entropy step. Without it the model stays as it is, in evaluation
            mode, and only the estimate moves.
    """

    title = "Logit adjustment"
    reference = (
        "Menon et al., Long-tail learning via logit adjustment, ICLR 2021, "
        "https://arxiv.org/abs/2007.07314; Hong et al., Disentangling label distribution for "
        "long-tailed visual recognition, CVPR 2021, https://arxiv.org/abs/2012.00321"
    )
    needs = frozenset({"source prior"})

    def __init__(
        self,
        model: nn.Module,
        source_prior: Sequence[float],
        strategy: str = "balanced_softmax",
        estimator: str = "ema",
        estimator_settings: Mapping[str, Any] | None = None,
        prior: Sequence[float] | None = None,
        lr: float = 1e-3,
        optim: str = "adam",
        momentum: float = 0.01,
        freeze: Sequence[str] = (),
        step: bool = True,
    ) -> None:
        _refuse_adapter(model)
        if strategy not in STRATEGIES:
            raise SettingError("strategy", must_be=f"one of {list(STRATEGIES)}", got=repr(strategy))
        if step:
            super().__init__(model, lr, optim, freeze, momentum=momentum)
        else:
            Method.__init__(self, model)
            self.lr, self.optim, self.freeze, self.momentum = lr, optim, paths(freeze), momentum
        source = check_prior(source_prior, class_count(model), "source_prior")
        if STRATEGIES[strategy] and not source.all():
            raise PriorError(
                "source_prior of a model trained by cross_entropy",
                must_be="above 0 for every class",
                got=f"0 for class {source.argmin()}",
            )
        self.source_prior, self.strategy, self.step = _floats(source_prior), strategy, step
        self.estimator = estimator
        self.estimator_settings = None if estimator_settings is None else dict(estimator_settings)
        self._source = torch.from_numpy(source)
        if prior is None:
            facts = {**(estimator_settings or {}), "classes": len(source)}
            self._given, self._estimate = None, estimators.create(estimator, **facts)
        else:
            self._estimate = estimators.Fixed(len(source), prior)
            self._given = list(_floats(prior))
        self.ready()

    @property
    def prior(self) -> Tensor:
        """The label distribution believed in now."""
        return self._estimate.prior

    def adjust(self, logits: Tensor) -> Tensor:
        """Logits for the label distribution believed in now."""
        logits = logits + self.prior.to(logits).clamp(min=FLOOR).log()
        return logits - self._source.to(logits).log() if STRATEGIES[self.strategy] else logits

    def adapt(self, x: Tensor) -> Tensor:
        """Predict, adjust and step by the estimate so far, then estimate."""
        if self.step:
            raw = super().adapt(x).detach()
        else:
            with torch.no_grad():
                raw = self.predict(x)
        logits = self.adjust(raw)
        seen = raw if self._estimate.reads_unadjusted else logits
        self._estimate.update(seen.softmax(1))
        return logits

    def loss(self, logits: Tensor) -> Tensor:
        """Mean entropy of the adjusted prediction."""
        return entropy(self.adjust(logits)).mean()

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments but the model; ``prior`` as it was given."""
        return {**super().settings(), "prior": self._given}

    def state(self) -> State:
        """The model's state and the estimate's."""
        return with_estimate(super().state(), self._estimate)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put a state back, bit for bit."""
        load_with_estimate(state, self._estimate, super().load_state)


def _refuse_adapter(model: nn.Module) -> None:
    if next(adapted_heads(model), None) is not None:
        raise ModelError(
            "the model of logit_adjust",
            must_be="a bare classifier",
            got="one with an adapter attached, which corrects the label shift already",
            cure="detach(model) first.",
        )


def _floats(given: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(share) for share in given)
